/** A place in a document where two revisions of it differ. */
export interface Change {
  /** Such as "aliases.live.version" or "versions[2].digest". */
  path: string;
  before: unknown;
  after: unknown;
}

/** Every leaf that is different, in the documents' order; `undefined` where one has nothing there. */
export function changesOf(before: unknown, after: unknown, path = ""): Change[] {
  if (Array.isArray(before) && Array.isArray(after)) {
    return range(Math.max(before.length, after.length)).flatMap((index) => changesOf(before[index], after[index], `${path}[${index + 1}]`));
  }
  if (isRecord(before) && isRecord(after)) {
    const names = [...new Set([...Object.keys(before), ...Object.keys(after)])];
    return names.flatMap((name) => changesOf(before[name], after[name], path ? `${path}.${name}` : name));
  }
  return JSON.stringify(before) === JSON.stringify(after) ? [] : [{ path, before, after }];
}

/** Short enough for a cell; long values keep their beginning. */
export function valueText(value: unknown): string {
  if (value === undefined || value === null) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function range(length: number): number[] {
  return Array.from({ length }, (_, index) => index);
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

import { dateTime } from "./format";

/** A field in which two revisions of a document differ. */
export interface Change {
  /** Such as "aliases.live.version" or "versions[2].digest". */
  path: string;
  before: unknown;
  after: unknown;
}

type Fields = Record<string, unknown>;

/** Fields in unix seconds, such as created_at or pin.until. */
const TIME = /(_at|until)$/;

/** Every leaf that differs, in the documents' order; `undefined` where one of them has no value or null. */
export function changesOf(before: unknown, after: unknown, path = ""): Change[] {
  if (Array.isArray(before) && Array.isArray(after)) {
    return range(Math.max(before.length, after.length)).flatMap((index) => changesOf(before[index], after[index], `${path}[${index + 1}]`));
  }
  const [from, to] = [before ?? undefined, after ?? undefined];
  if (isRecord(from ?? to) && isRecord(to ?? from)) return changesOfFields((from ?? {}) as Fields, (to ?? {}) as Fields, path);
  return JSON.stringify(from) === JSON.stringify(to) ? [] : [{ path, before: from, after: to }];
}

function changesOfFields(before: Fields, after: Fields, path: string): Change[] {
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])];
  return names.flatMap((name) => changesOf(before[name], after[name], path ? `${path}.${name}` : name));
}

/** The value as text; a number whose `path` names a time is shown as one. */
export function valueText(value: unknown, path: string): string {
  if (value === undefined) return "–";
  if (typeof value === "number" && TIME.test(path)) return dateTime(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

function range(length: number): number[] {
  return Array.from({ length }, (_, index) => index);
}

function isRecord(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

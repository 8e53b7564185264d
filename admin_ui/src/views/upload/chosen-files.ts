import { CONFIG_FILE, WEIGHTS_FILE } from "./upload-job";

/** Dropped or selected files: those an adapter needs, those ignored, and problems found before anything is sent. */
export interface ChosenFiles {
  files: File[];
  ignored: string[];
  problems: string[];
  /** Name of the folder they were in, if any. */
  folder: string | null;
}

const NEEDED = [CONFIG_FILE, WEIGHTS_FILE];
const MAX_CONFIG_BYTES = 64 * 1024;

export function choose(dropped: { file: File; path: string }[]): ChosenFiles {
  const files: File[] = [];
  const ignored: string[] = [];
  const problems: string[] = [];
  let folder: string | null = null;
  for (const { file, path } of dropped) {
    if (!NEEDED.includes(file.name)) {
      ignored.push(path);
      continue;
    }
    if (files.some((known) => known.name === file.name)) {
      problems.push(`${file.name} was found twice. Drop the folder of a single adapter.`);
      continue;
    }
    files.push(file);
    folder ??= path.split("/").at(-2) ?? null;
  }
  for (const name of NEEDED) {
    const file = files.find((known) => known.name === name);
    if (!file) problems.push(missing(name, ignored));
    else if (file.size === 0) problems.push(`${name} is empty.`);
  }
  const config = files.find((file) => file.name === CONFIG_FILE);
  if (config && config.size > MAX_CONFIG_BYTES) problems.push(`${CONFIG_FILE} has ${config.size} bytes; at most ${MAX_CONFIG_BYTES} are allowed.`);
  return { files, ignored, problems: [...new Set(problems)], folder };
}

function missing(name: string, ignored: string[]): string {
  if (name === WEIGHTS_FILE && ignored.some((path) => path.endsWith(".bin"))) {
    return "adapter_model.bin is a pickle, which can run code. Save the adapter with safe_serialization=True to get adapter_model.safetensors.";
  }
  return `${name} is missing.`;
}

/** An adapter name derived from the folder's, using only characters that names may contain. */
export function nameFrom(folder: string | null): string {
  return (folder ?? "")
    .replace(/[^A-Za-z0-9._-]+/g, "-")
    .replace(/^[^A-Za-z0-9]+/, "")
    .slice(0, 64);
}

/** All files of a drop, including those in folders of any depth. */
export async function readDrop(transfer: DataTransfer): Promise<{ file: File; path: string }[]> {
  // Synchronously, because the browser empties the drop after its event. A file that is in no file system has no entry.
  const found = [...transfer.items].filter((item) => item.kind === "file").map((item) => item.webkitGetAsEntry() ?? item.getAsFile());
  return (await Promise.all(found.map((one) => (one instanceof File ? [{ file: one, path: one.name }] : one ? readEntry(one) : [])))).flat();
}

async function readEntry(entry: FileSystemEntry): Promise<{ file: File; path: string }[]> {
  if (entry.isFile) {
    const file = await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject));
    return [{ file, path: entry.fullPath.replace(/^\//, "") }];
  }
  const reader = (entry as FileSystemDirectoryEntry).createReader();
  const found: { file: File; path: string }[] = [];
  for (;;) {
    const batch = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
    if (batch.length === 0) return found;
    found.push(...(await Promise.all(batch.map(readEntry))).flat());
  }
}

export function readInput(input: HTMLInputElement): { file: File; path: string }[] {
  return [...(input.files ?? [])].map((file) => ({ file, path: file.webkitRelativePath || file.name }));
}

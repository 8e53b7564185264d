import { CONFIG_FILE, WEIGHTS_FILE } from "./upload-job";

/** What a person dropped, sorted into what an adapter needs, what is left out, and what is wrong before anything is sent. */
export interface ChosenFiles {
  files: File[];
  ignored: string[];
  problems: string[];
  /** Of the folder they were in, where there was one. */
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
      problems.push(`${file.name} is there twice. Drop the folder of one adapter.`);
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
  if (config && config.size > MAX_CONFIG_BYTES) problems.push(`${CONFIG_FILE} has ${config.size} bytes; ${MAX_CONFIG_BYTES} are allowed.`);
  return { files, ignored, problems: [...new Set(problems)], folder };
}

function missing(name: string, ignored: string[]): string {
  if (name === WEIGHTS_FILE && ignored.some((path) => path.endsWith(".bin"))) {
    return "adapter_model.bin is a pickle, which can run code. Save the adapter with safe_serialization=True for adapter_model.safetensors.";
  }
  return `${name} is missing.`;
}

/** A name from the folder's, in the letters that names may have. */
export function nameFrom(folder: string | null): string {
  return (folder ?? "")
    .replace(/[^A-Za-z0-9._-]+/g, "-")
    .replace(/^[^A-Za-z0-9]+/, "")
    .slice(0, 64);
}

/** Files of a drop, folders included, whatever their depth. */
export async function readDrop(transfer: DataTransfer): Promise<{ file: File; path: string }[]> {
  // At once: the browser empties the drop when its event is over. What is in no file system has no entry.
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

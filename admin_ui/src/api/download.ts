import { heard, open } from "./client";

/** Saves the response to a GET as a file. Uses `fetch` because a link cannot send the tenant header. */
export async function download(path: string, fileName: string, headers: Record<string, string> = {}): Promise<void> {
  const response = await open("GET", path, { headers });
  saveBlob(await heard("GET", () => response.blob()), fileName);
}

export function saveBlob(blob: Blob, fileName: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = fileName;
  link.click();
  URL.revokeObjectURL(link.href);
}

import { effect, signal } from "@preact/signals";

import type { UploadJob } from "./upload-job";

/** What this page sends: it goes on while the person looks at another view, and is found again on the way back. */
export const currentJob = signal<UploadJob | null>(null);

/** Only this page has the files: before it goes, whatever view is shown, the browser asks. */
effect(() => {
  if (currentJob.value === null || currentJob.value.ended.value) return;
  const ask = (event: BeforeUnloadEvent) => event.preventDefault();
  window.addEventListener("beforeunload", ask);
  return () => window.removeEventListener("beforeunload", ask);
});

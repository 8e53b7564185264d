import { effect, signal } from "@preact/signals";

import type { UploadJob } from "./upload-job";

/** The upload that this page sends. It continues while the user visits other views, and is shown again when they return. */
export const currentJob = signal<UploadJob | null>(null);

/** Only this page has the files, so in every view the browser asks before it closes the page. */
effect(() => {
  if (currentJob.value === null || currentJob.value.ended.value) return;
  const ask = (event: BeforeUnloadEvent) => event.preventDefault();
  window.addEventListener("beforeunload", ask);
  return () => window.removeEventListener("beforeunload", ask);
});

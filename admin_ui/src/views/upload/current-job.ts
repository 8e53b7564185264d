import { signal } from "@preact/signals";

import type { UploadJob } from "./upload-job";

/** What this page sends: it goes on while the person looks at another view, and is found again on the way back. */
export const currentJob = signal<UploadJob | null>(null);

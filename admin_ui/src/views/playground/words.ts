import { computed, signal } from "@preact/signals";

import { numLogins, session } from "../../state/session";

const NONE = { prompt: "", system: "", schema: "", documents: "" };

/** What is typed into the playground: found again on the way back from another view. In this page's memory only. */
export const words = signal(NONE);

// Who logs in after somebody does not find it.
computed(() => `${session.value?.key_id} ${numLogins.value}`).subscribe(() => (words.value = NONE));

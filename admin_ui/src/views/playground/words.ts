import { computed, signal } from "@preact/signals";

import { numLogins, session } from "../../state/session";

const NONE = { prompt: "", system: "", schema: "", documents: "" };

/** Text typed into the playground; kept, in this page's memory only, while the user visits other views. */
export const words = signal(NONE);

// Cleared when someone else logs in.
computed(() => `${session.value?.key_id} ${numLogins.value}`).subscribe(() => (words.value = NONE));

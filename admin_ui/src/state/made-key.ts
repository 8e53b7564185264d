import { effect, signal } from "@preact/signals";

import { signedOut } from "../api/client";
import type { CreatedKey } from "../api/types";
import { logIn, session } from "./session";

/** The key whose secret stays on the screen, in every view, until the user confirms having it. In this page's memory only. */
export const madeKey = signal<CreatedKey | null>(null);

// Logging out leaves no secret behind. Exception: if an open server now requires a key, the user has the secret nowhere else.
effect(() => {
  if (signedOut.value && !session.peek()?.open) madeKey.value = null;
});

/**
 * The first key of an open server shuts out everyone without a key, including this page unless it logs in with that key.
 * Call before any other request. Returns whether it logged in: an `infer` key may not, and the login form then asks for another.
 */
export async function tryGoOnAs({ role, secret }: CreatedKey): Promise<boolean> {
  if (role === "infer" || secret === null) return false;
  try {
    await logIn({ key: secret });
    return true;
  } catch {
    return false;
  }
}

import { effect, signal } from "@preact/signals";

import { signedOut } from "../api/client";
import type { CreatedKey } from "../api/types";
import { logIn, session } from "./session";

/** Whose secret is on the screen, whatever else is, until the person says that they have it. In this page's memory only. */
export const madeKey = signal<CreatedKey | null>(null);

// Logging out leaves no secret behind. Whom an open server shut out, because it has a key now, has it nowhere else.
effect(() => {
  if (signedOut.value && !session.peek()?.open) madeKey.value = null;
});

/**
 * The first key of an open server shuts out everybody without one, this page too unless it logs in with that key. To be
 * done before anything else is asked. Whether it did: a key for requests only may not, and the login takes the others.
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

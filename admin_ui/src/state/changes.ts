import { signal } from "@preact/signals";

/** Counts what was taken back: the view that is open then, perhaps not the one it was done in, asks anew. */
export const takenBack = signal(0);

/** Counts the tenants that were made, deleted or restored here: whoever lists them elsewhere on the page asks anew. */
export const numTenantsChanged = signal(0);

/** Call `refresh` after each; returns how to stop. */
export function onTakenBack(refresh: () => void): () => void {
  const known = takenBack.peek();
  return takenBack.subscribe((count) => {
    if (count !== known) refresh();
  });
}

import { signal } from "@preact/signals";

/** Number of undone actions. The view that is open at that time, perhaps not the one of the action, fetches again. */
export const takenBack = signal(0);

/** Number of tenants created, deleted or restored here. Other lists of tenants on the page then fetch again. */
export const numTenantsChanged = signal(0);

/** Calls `refresh` after each undo; returns a function that stops it. */
export function onTakenBack(refresh: () => void): () => void {
  const known = takenBack.peek();
  return takenBack.subscribe((count) => {
    if (count !== known) refresh();
  });
}

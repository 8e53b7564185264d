/** What the browser kept for this page; null also where it keeps nothing, as with all cookies blocked. */
export function kept(storage: () => Storage, name: string): string | null {
  try {
    return storage().getItem(name);
  } catch {
    return null;
  }
}

/** For the next time that the page is opened, where the browser agrees; "" = no longer. */
export function keep(storage: () => Storage, name: string, value: string): void {
  try {
    if (value) storage().setItem(name, value);
    else storage().removeItem(name);
  } catch {
    // Until the page is closed it is known all the same.
  }
}

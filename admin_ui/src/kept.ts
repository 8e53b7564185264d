/** The value that the browser stored for this page; null if there is none, or if the browser stores nothing (all cookies blocked). */
export function kept(storage: () => Storage, name: string): string | null {
  try {
    return storage().getItem(name);
  } catch {
    return null;
  }
}

/** Stores a value for the next visit, if the browser allows it; "" removes it. */
export function keep(storage: () => Storage, name: string, value: string): void {
  try {
    if (value) storage().setItem(name, value);
    else storage().removeItem(name);
  } catch {
    // The page still knows the value until it is closed.
  }
}

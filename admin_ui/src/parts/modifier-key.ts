/** Whether shortcuts are with ⌘ here, and not with Ctrl. */
const isApple = /Mac|iPhone|iPad/.test(navigator.platform);

/** "⌘K", or "Ctrl+K". */
export function shortcut(key: string): string {
  return isApple ? `⌘${key}` : `Ctrl+${key}`;
}

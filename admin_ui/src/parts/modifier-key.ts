/** Whether shortcuts use ⌘ on this device, rather than Ctrl. */
const isApple = /Mac|iPhone|iPad/.test(navigator.platform);

/** "⌘K", or "Ctrl+K". */
export function shortcut(key: string): string {
  return isApple ? `⌘${key}` : `Ctrl+${key}`;
}

import { signal } from "@preact/signals";

import { takenBack } from "../state/changes";
import { Icon } from "./icon";

interface Toast {
  id: number;
  text: string;
  undo?: () => Promise<unknown>;
}

const SHOWN_MS = 8000;
const toasts = signal<Toast[]>([]);
/** Whether a toast is hovered or focused: then none expires. */
let held = false;
let lastId = 0;

/** Reports an action. `undo` is offered while the toast is visible; after an undo, the current view is refreshed. */
export function toast(text: string, undo?: () => Promise<unknown>): void {
  const id = ++lastId;
  toasts.value = [...toasts.value, { id, text, ...(undo ? { undo } : {}) }];
  expire(id);
}

function expire(id: number): void {
  window.setTimeout(() => (held ? expire(id) : dismiss(id)), SHOWN_MS);
}

function dismiss(id: number): void {
  // An element removed under the pointer fires no mouseleave.
  held = false;
  toasts.value = toasts.value.filter((shown) => shown.id !== id);
}

async function takeBack(shown: Toast): Promise<void> {
  dismiss(shown.id);
  try {
    await shown.undo?.();
    takenBack.value += 1;
    toast("Undone.");
  } catch (error) {
    toast(`Could not undo: ${error instanceof Error ? error.message : String(error)}`);
  }
}

export function Toasts() {
  return (
    <div
      class="toasts"
      role="status"
      aria-live="polite"
      onMouseEnter={() => (held = true)}
      onMouseLeave={() => (held = false)}
      onFocusIn={() => (held = true)}
      onFocusOut={() => (held = false)}
    >
      {toasts.value.map((shown) => (
        <div key={shown.id} class="toast" data-testid="toast">
          <span>{shown.text}</span>
          {shown.undo && (
            <button type="button" class="button is-quiet" onClick={() => takeBack(shown)}>
              <Icon name="undo" /> Undo
            </button>
          )}
          <button type="button" class="button is-quiet is-icon" aria-label="Dismiss" onClick={() => dismiss(shown.id)}>
            <Icon name="cross" />
          </button>
        </div>
      ))}
    </div>
  );
}

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { Icon } from "./icon";

/** A button that opens more buttons. Closes after a choice, on Escape, and when the user clicks or focuses elsewhere. */
export function Menu({ label, children }: { label: string; children: ComponentChildren }) {
  const menu = useRef<HTMLDetailsElement>(null);

  function close(): void {
    if (menu.current) menu.current.open = false;
  }

  /** The focused item is hidden by closing; focusing the menu button lets a dialog return the focus to it. */
  function closeAndReturn(): void {
    close();
    menu.current?.querySelector("summary")?.focus();
  }

  useEffect(() => {
    function onPointer(event: Event): void {
      if (!menu.current?.contains(event.target as Node)) close();
    }
    function onKey(event: KeyboardEvent): void {
      if (event.key === "Escape" && menu.current?.open) closeAndReturn();
    }
    document.addEventListener("pointerdown", onPointer);
    document.addEventListener("focusin", onPointer);
    document.addEventListener("keydown", onKey);
    return () => {
      document.removeEventListener("pointerdown", onPointer);
      document.removeEventListener("focusin", onPointer);
      document.removeEventListener("keydown", onKey);
    };
  }, []);

  return (
    <details class="menu" ref={menu}>
      <summary class="button is-icon" aria-label={label}>
        <Icon name="more" />
      </summary>
      <div class="menu-items" onClick={closeAndReturn}>
        {children}
      </div>
    </details>
  );
}

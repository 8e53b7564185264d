import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { Icon } from "./icon";

/** Buttons behind a button. It closes when one was chosen, on Escape, and when the person goes elsewhere. */
export function Menu({ label, children }: { label: string; children: ComponentChildren }) {
  const menu = useRef<HTMLDetailsElement>(null);

  function close(): void {
    if (menu.current) menu.current.open = false;
  }

  /** What has the focus goes out of sight, and a dialog gives it back to where it was. */
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

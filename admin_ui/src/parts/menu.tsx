import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { Icon } from "./icon";

/** Buttons behind a button. It closes when one was chosen, on Escape, and when the person goes elsewhere. */
export function Menu({ label, children }: { label: string; children: ComponentChildren }) {
  const menu = useRef<HTMLDetailsElement>(null);

  useEffect(() => {
    function close(): void {
      if (menu.current) menu.current.open = false;
    }
    function onPointer(event: Event): void {
      if (!menu.current?.contains(event.target as Node)) close();
    }
    function onKey(event: KeyboardEvent): void {
      if (event.key !== "Escape" || !menu.current?.open) return;
      close();
      menu.current.querySelector("summary")?.focus();
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
      <div
        class="menu-items"
        onClick={() => {
          if (menu.current) menu.current.open = false;
        }}
      >
        {children}
      </div>
    </details>
  );
}

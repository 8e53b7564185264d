import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

interface VirtualRowsProps<T> {
  rows: T[];
  rowHeight: number;
  columns: number;
  children: (row: T, index: number) => ComponentChildren;
  /** Called when the end of the list is near. */
  onNearEnd?: () => void;
}

const OVERSCAN = 12;

/** A table body of any length that renders about a screenful of rows; the page itself scrolls. */
export function VirtualRows<T>({ rows, rowHeight, columns, children, onNearEnd }: VirtualRowsProps<T>) {
  const body = useRef<HTMLTableSectionElement>(null);
  const first = useSignal(0);
  const last = useSignal(Math.min(rows.length, 40));

  useLayoutEffect(() => {
    function measure(): void {
      const top = body.current?.getBoundingClientRect().top ?? 0;
      const from = Math.max(0, Math.floor(-top / rowHeight) - OVERSCAN);
      const to = Math.min(rows.length, Math.ceil((window.innerHeight - top) / rowHeight) + OVERSCAN);
      first.value = Math.min(from, Math.max(0, rows.length - 1));
      last.value = Math.max(to, 0);
      if (to >= rows.length - OVERSCAN) onNearEnd?.();
    }
    measure();
    window.addEventListener("scroll", measure, { passive: true });
    window.addEventListener("resize", measure);
    return () => {
      window.removeEventListener("scroll", measure);
      window.removeEventListener("resize", measure);
    };
  }, [rows, rowHeight]);

  const shown = rows.slice(first.value, last.value);
  return (
    <tbody ref={body}>
      <Spacer height={first.value * rowHeight} columns={columns} />
      {shown.map((row, index) => children(row, first.value + index))}
      <Spacer height={Math.max(0, rows.length - last.value) * rowHeight} columns={columns} />
    </tbody>
  );
}

function Spacer({ height, columns }: { height: number; columns: number }) {
  if (height === 0) return null;
  return (
    <tr aria-hidden="true" class="spacer">
      <td colSpan={columns} style={{ height: `${height}px`, padding: 0, border: 0 }} />
    </tr>
  );
}

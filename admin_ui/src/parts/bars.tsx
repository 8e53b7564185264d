import "./bars.css";

import { useSignal } from "@preact/signals";

import { Amount } from "./basics";
import type { Quantity } from "./format";

export interface Stack {
  label: string;
  /** One per step. */
  values: number[];
  /** One of the six identity hues; null = the groups combined as “others”. */
  hue: number | null;
}

interface BarsProps {
  title: string;
  /** Unix seconds at which each step begins. */
  starts: number[];
  stacks: Stack[];
  format: (value: number) => Quantity;
  /** The label of a step, such as its day and hour. */
  when: (start: number) => string;
  /** A shorter label, for the axis below the plot. */
  tick: (start: number) => string;
}

const NUM_TIMES = 4;
const GAP = 0.14;

/** Sums per step, stacked by group. The legend shows the totals, or one step's values while it is hovered or touched. */
export function Bars({ title, starts, stacks, format, when, tick }: BarsProps) {
  const chosen = useSignal<number | null>(null);
  const heights = starts.map((_, step) => stacks.reduce((sum, stack) => sum + (stack.values[step] ?? 0), 0));
  const top = niceTop(Math.max(0, ...heights));
  const shown = chosen.value !== null && chosen.value < starts.length ? chosen.value : null;
  const total = heights.reduce((sum, height) => sum + height, 0);
  const of = (stack: Stack): number => (shown === null ? stack.values.reduce((sum, value) => sum + value, 0) : (stack.values[shown] ?? 0));

  function choose(event: PointerEvent): void {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const step = Math.floor(((event.clientX - box.left) / box.width) * starts.length);
    chosen.value = Math.min(starts.length - 1, Math.max(0, step));
  }

  return (
    <figure class="bars" role="group" aria-label={`${title}: ${words(format(total))} total`}>
      <div class="bars-plot">
        {[1, 0.5, 0].map((share) => (
          <span key={share} class="bars-tick muted small num" style={{ top: `${100 * (1 - share)}%` }}>
            {words(format(top * share))}
          </span>
        ))}
        <svg
          viewBox={`0 0 ${Math.max(1, starts.length)} 1`}
          preserveAspectRatio="none"
          aria-hidden="true"
          onPointerMove={choose}
          onPointerDown={choose}
          onPointerLeave={() => (chosen.value = null)}
        >
          {[0, 0.5, 1].map((y) => (
            <line key={y} class="bars-grid" x1={0} x2={starts.length} y1={y} y2={y} />
          ))}
          {shown !== null && <rect class="bars-chosen" x={shown} y={0} width={1} height={1} />}
          {starts.map((_, step) => (
            <Step key={step} step={step} stacks={stacks} top={top} />
          ))}
        </svg>
      </div>
      <div class="bars-times muted small num" aria-hidden="true">
        {Array.from({ length: NUM_TIMES }, (_, index) => Math.round((index / NUM_TIMES) * starts.length)).map((step) => (
          <span key={step} style={{ left: `${(100 * step) / Math.max(1, starts.length)}%` }}>
            {starts[step] !== undefined && tick(starts[step])}
          </span>
        ))}
      </div>
      <ul class="bars-legend small">
        <li class="muted num">{shown === null ? "Total" : when(starts[shown] ?? 0)}</li>
        {stacks.map((stack) => (
          <li key={stack.label}>
            <span class="swatch" style={{ background: colorOf(stack.hue) }} aria-hidden="true" />
            <span class="truncate">{stack.label}</span>
            <Amount of={format(of(stack))} />
          </li>
        ))}
      </ul>
    </figure>
  );
}

function Step({ step, stacks, top }: { step: number; stacks: Stack[]; top: number }) {
  let below = 0;
  return (
    <>
      {stacks.map((stack) => {
        const height = (stack.values[step] ?? 0) / top;
        below += height;
        return height > 0 && <rect key={stack.label} x={step + GAP} width={1 - 2 * GAP} y={1 - below} height={height} fill={colorOf(stack.hue)} />;
      })}
    </>
  );
}

export function colorOf(hue: number | null): string {
  return hue === null ? "color-mix(in oklab, var(--muted) 55%, transparent)" : `var(--hue-${hue})`;
}

/** `most` rounded up to the next of 1, 2, 5, 10, … */
function niceTop(most: number): number {
  if (most <= 0) return 1;
  const scale = 10 ** Math.floor(Math.log10(most));
  return scale * ([1, 2, 5, 10].find((step) => most <= step * scale) ?? 10);
}

function words({ value, unit }: Quantity): string {
  return unit ? `${value} ${unit}` : value;
}

import { useSignal } from "@preact/signals";

import type { EngineItem } from "../../api/types";
import { Amount, Chip } from "../../parts/basics";
import { bytes } from "../../parts/format";
import { href } from "../../router";

type Extent = EngineItem["arena"][number];

const NUM_HUES = 6;
/** If a smaller share of the memory is in use, it would be too thin to see at full scale. */
const SMALL_SHARE = 0.2;

/** Adapter memory to scale: every extent at its offset, gaps left empty, one color per content. */
export function ArenaStrip({ engine }: { engine: EngineItem }) {
  const shown = useSignal<string | null>(null);
  const { arena, arena_size_bytes: size } = engine;
  const end = Math.max(0, ...arena.map((extent) => extent.offset_bytes + extent.size_bytes));
  const shownBytes = end > 0 && end < size * SMALL_SHARE ? Math.ceil(end * 1.1) : size;
  const chosen = arena.find((extent) => key(extent) === shown.value);
  return (
    <div class="arena">
      <svg
        class="arena-strip"
        viewBox={`0 0 ${Math.max(1, shownBytes)} 1`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${arena.length} adapters in memory`}
        data-testid="arena-strip"
        onMouseLeave={() => (shown.value = null)}
      >
        {arena.map((extent) => (
          <rect
            key={key(extent)}
            x={extent.offset_bytes}
            y={extent.in_use ? 0 : 0.22}
            width={extent.size_bytes}
            height={extent.in_use ? 1 : 0.78}
            fill={color(extent.digest)}
            opacity={shown.value === null || shown.value === key(extent) ? 1 : 0.35}
            onMouseEnter={() => (shown.value = key(extent))}
          />
        ))}
      </svg>
      {shownBytes < size && (
        <p class="muted small">
          Showing the first <Amount of={bytes(shownBytes)} />; the rest is free.
        </p>
      )}
      {arena.length > 0 && (
        <ul class="arena-rows">
          {(chosen ? [chosen] : arena.slice(0, 12)).map((extent) => (
            <li key={key(extent)} onMouseEnter={() => (shown.value = key(extent))}>
              <span class="swatch" style={{ background: color(extent.digest) }} aria-hidden="true" />
              {extent.adapter ? (
                <a href={href(["adapters", extent.adapter], { tenant: extent.tenant, v: extent.version === null ? null : String(extent.version) })}>
                  {extent.adapter} v{extent.version}
                </a>
              ) : (
                <span class="muted">{extent.digest ? extent.digest.slice(0, 8) : "another tenant's adapter"}</span>
              )}
              <Amount of={bytes(extent.size_bytes)} />
              {extent.in_use && (
                <Chip tone="accent" icon="play">
                  running
                </Chip>
              )}
            </li>
          ))}
          {!chosen && arena.length > 12 && <li class="muted">and {arena.length - 12} more</li>}
        </ul>
      )}
    </div>
  );
}

function key(extent: Extent): string {
  return `${extent.offset_bytes}`;
}

function color(digest: string | null): string {
  if (digest === null) return "color-mix(in oklab, var(--muted) 45%, transparent)";
  return `var(--hue-${(Number.parseInt(digest.slice(0, 6), 16) % NUM_HUES) + 1})`;
}

import type { ComponentChildren } from "preact";

import type { LiveView, SeriesView } from "../../api/types";
import { Chip, Command } from "../../parts/basics";
import { curlRequest } from "../../parts/commands";
import { count, milliseconds, percent, type Quantity } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { href } from "../../router";
import { mayActForAll, session } from "../../state/session";

const TROUBLE_OF_REDIS: Record<string, string> = {
  full: "Redis is full: requests are served, but no changes can be made and no one can log in. Raise its maxmemory.",
  grace: "Redis is unreachable: requests with known keys are served for a short while, and no changes can be made.",
  gone: "Redis is unreachable: requests are refused until it is back.",
};

/** The current state in eight figures, each a link to the rows behind it. */
export function Now({ live, series }: { live: LiveView; series: SeriesView | null }) {
  const { engines } = live;
  const sum = (of: (engine: (typeof engines)[number]) => number): number => engines.reduce((total, engine) => total + of(engine), 0);
  const numBlocks = sum((engine) => engine.kv.num_blocks);
  const arenaBytes = sum((engine) => engine.arena_size_bytes);
  const waiting = sum((engine) => engine.num_waiting);
  const errors = series?.errors_per_s.findLast((value) => value !== null) ?? null;
  // These figures cover all tenants, so the linked rows do too.
  const all = { tenant: mayActForAll.value ? "*" : null };
  const unwell = engines.filter((engine) => engine.state !== "ready");
  const idle = sum((engine) => engine.num_running + engine.num_waiting) === 0 && latest(series?.requests_per_s) === null;
  return (
    <div class="stack">
      {engines.length === 0 && (
        <p class="notice is-bad" role="alert">
          <Icon name="warn" /> No engine is responding. Its process may be restarting; see the server log for the reason.
        </p>
      )}
      {unwell.map((engine) => (
        <p key={engine.id} class="notice is-bad" role="alert">
          <Icon name="warn" /> Engine <code>{engine.id}</code> is {engine.state}.
        </p>
      ))}
      {live.redis !== "ready" && (
        <p class="notice is-warn" role="alert">
          <Icon name="warn" />{" "}
          {TROUBLE_OF_REDIS[live.redis] ?? `Redis is ${live.redis}.`}
        </p>
      )}
      <div class="tiles">
        <Tile label="Tokens per second" of={count(Math.round(sum((engine) => engine.tokens_per_s)))} to={href(["live"])} />
        <Tile label="Running" of={count(sum((engine) => engine.num_running))} to={href(["requests"], { state: "running", ...all })} />
        <Tile label="Waiting" of={count(waiting)} to={href(["live"])}>
          {waiting > 0 && (
            <Chip tone="warn" icon="clock">
              queued
            </Chip>
          )}
        </Tile>
        <Tile label="Errors per second" of={shown(errors, perSecond)} to={href(["requests"], { state: "error", ...all })}>
          {errors !== null && errors > 0 && (
            <Chip tone="bad" icon="warn">
              failing
            </Chip>
          )}
        </Tile>
        <Tile label="TTFT p95" of={shown(latest(series?.ttft_p95_ms), milliseconds)} to={href(["requests"], all)} />
        <Tile label="ITL p95" of={shown(latest(series?.itl_p95_ms), milliseconds)} to={href(["requests"], all)} />
        <Tile label="KV cache in use" of={numBlocks > 0 ? percent(sum((engine) => engine.kv.num_used) / numBlocks) : null} to={href(["live"])} />
        <Tile label="Adapter memory" of={arenaBytes > 0 ? percent(sum((engine) => engine.arena_used_bytes) / arenaBytes) : null} to={href(["live"])} />
      </div>
      {idle && (
        <div class="first-request">
          <p class="muted">No requests yet. Send the first one:</p>
          <Command>{curlRequest(session.value?.model ?? "")}</Command>
        </div>
      )}
    </div>
  );
}

function Tile({ label, of, to, children }: { label: string; of: Quantity | null; to: string; children?: ComponentChildren }) {
  return (
    <a class="tile" href={to}>
      <span class="tile-label">{label}</span>
      <span class="tile-value num">
        {of ? of.value : "–"}
        {of?.unit && <span class="unit">{of.unit}</span>}
        {children}
      </span>
    </a>
  );
}

function perSecond(value: number): Quantity {
  return { value: value === 0 ? "0" : value.toFixed(value < 10 ? 1 : 0), unit: "" };
}

function latest(values: (number | null)[] | undefined): number | null {
  return values?.findLast((value) => value !== null) ?? null;
}

function shown(value: number | null, format: (value: number) => Quantity): Quantity | null {
  return value === null ? null : format(value);
}

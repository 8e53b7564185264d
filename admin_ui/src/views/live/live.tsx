import "./live.css";

import { call } from "../../api/client";
import type { EngineItem, LiveView } from "../../api/types";
import { Amount, Chip } from "../../parts/basics";
import { ago, bytes, count } from "../../parts/format";
import { Empty, SkeletonRows, View } from "../../parts/states";
import { href } from "../../router";
import { usePolled } from "../../state/polled";
import { mayActForAll, otherTenant } from "../../state/session";
import { ArenaStrip } from "./arena-strip";
import { MemoryHistory } from "./memory-history";

/** The engines' state: the contents of their memory, and their queues. */
export function Live() {
  const live = usePolled("live", async (signal) => (await call<LiveView>("GET", "/v1/live", { signal })).data);
  return (
    <>
      <div class="page-head">
        <h1>Live</h1>
      </div>
      <View of={live} skeleton={<SkeletonRows rows={8} />}>
        {({ engines }) =>
          engines.length === 0 ? (
            <Empty icon="live" title="No engine is responding" command="loraserve doctor">
              Its process may be restarting; see the server log for the reason.
            </Empty>
          ) : (
            <div class="stack">
              {engines.map((engine) => (
                <Engine key={engine.id} engine={engine} />
              ))}
              <MemoryHistory />
            </div>
          )
        }
      </View>
    </>
  );
}

function Engine({ engine }: { engine: EngineItem }) {
  const well = engine.state === "ready";
  return (
    <section class="panel" aria-label={`Engine ${engine.id}`}>
      <header class="panel-head">
        <h2>
          Engine <code>{engine.id}</code>
        </h2>
        <span class="muted small">
          {engine.model} · {engine.device} · {engine.dtype}
          {engine.weights !== engine.dtype && `, weights ${engine.weights}`} · started {ago(engine.started_at)}
        </span>
        <Chip tone={well ? "ok" : "bad"} icon={well ? "check" : "warn"}>
          {engine.state}
        </Chip>
      </header>
      <div class="panel-body stack">
        <dl class="engine-figures">
          <Figure label="Running">
            <a href={href(["requests"], { state: "running", tenant: mayActForAll.value ? "*" : null })}>
              <Amount of={count(engine.num_running)} />
            </a>{" "}
            <span class="muted">of {engine.max_num_seqs}</span>
          </Figure>
          <Figure label="Waiting">
            <Amount of={count(engine.num_waiting)} />
          </Figure>
          <Figure label="Tokens per second">
            <Amount of={count(Math.round(engine.tokens_per_s))} />
          </Figure>
          <Figure label="Adapter loads">
            <Amount of={count(engine.num_adapter_loads)} />
          </Figure>
          <Figure label="Evictions">
            <Amount of={count(engine.num_adapter_evictions)} />
          </Figure>
          <Figure label="Preemptions">
            <Amount of={count(engine.num_preemptions)} />
          </Figure>
        </dl>
        <div>
          <p class="strip-head">
            <span>Adapter memory</span>
            <span class="muted num">
              <Amount of={bytes(engine.arena_used_bytes)} /> of <Amount of={bytes(engine.arena_size_bytes)} />
            </span>
          </p>
          <ArenaStrip engine={engine} />
        </div>
        <KvGauge engine={engine} />
        <Queues engine={engine} />
      </div>
    </section>
  );
}

function Figure({ label, children }: { label: string; children: preact.ComponentChildren }) {
  return (
    <div>
      <dt class="muted small">{label}</dt>
      <dd>{children}</dd>
    </div>
  );
}

function KvGauge({ engine }: { engine: EngineItem }) {
  const { num_blocks, num_used, num_cached, block_size } = engine.kv;
  const share = (blocks: number): string => `${(100 * blocks) / Math.max(1, num_blocks)}%`;
  return (
    <div>
      <p class="strip-head">
        <span>KV cache</span>
        <span class="muted num">
          <Amount of={count(num_used)} /> used and <Amount of={count(num_cached)} /> cached of <Amount of={count(num_blocks)} /> blocks ({block_size} tokens each)
        </span>
      </p>
      <div class="gauge" role="img" aria-label={`KV cache: ${num_used} blocks used and ${num_cached} cached, of ${num_blocks}`}>
        <span class="gauge-used" style={{ width: share(num_used) }} />
        <span class="gauge-cached" style={{ width: share(num_cached) }} />
      </div>
    </div>
  );
}

function Queues({ engine }: { engine: EngineItem }) {
  if (engine.queues.length === 0) return <p class="muted">No requests are running or waiting.</p>;
  return (
    <div class="scroll-x">
      <table class="table is-cards">
        <caption class="visually-hidden">Work by tenant and adapter</caption>
        <thead>
          <tr>
            <th>Tenant</th>
            <th>Adapter</th>
            <th class="right">Running</th>
            <th class="right">Queued</th>
            <th class="right">Tokens waiting</th>
          </tr>
        </thead>
        <tbody>
          {engine.queues.map((row) => (
            <tr key={`${row.tenant} ${row.adapter}`}>
              <td>{row.tenant ?? <span class="muted">others</span>}</td>
              <td data-label="Adapter">
                {row.adapter ? (
                  <a href={href(["requests"], { adapter: row.adapter, state: "running", tenant: otherTenant(row.tenant) })}>{row.adapter}</a>
                ) : (
                  <span class="muted">{row.tenant === null ? "any" : "base model"}</span>
                )}
              </td>
              <td class="right" data-label="Running">{row.num_running}</td>
              <td class="right" data-label="Queued">{row.num_queued}</td>
              <td class="right" data-label="Tokens waiting">
                <Amount of={count(row.num_tokens_waiting)} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { RequestItem } from "../../api/types";
import { Amount, CopyButton } from "../../parts/basics";
import { count, dateTime, milliseconds } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { SkeletonRows, View } from "../../parts/states";
import { href, place } from "../../router";
import { usePolled } from "../../state/polled";
import { may, otherTenant, tenantHeaders } from "../../state/session";
import { AbortDialog } from "./abort-dialog";
import { RequestState } from "./request-state";

/** One request: who sent it, for which model, and how its time was spent. */
export function RequestDetail({ id }: { id: string }) {
  const tenant = place.value.query.get("tenant");
  const aborting = useSignal(false);
  const request = usePolled(
    `request ${tenant}/${id}`,
    async (signal) => (await call<RequestItem>("GET", `/v1/requests/${encodeURIComponent(id)}`, { signal, headers: tenantHeaders(tenant) })).data,
  );
  const found = request.data.value;
  return (
    <>
      <div class="page-head">
        <h1 class="detail-name">
          Request {found && <RequestState request={found} />}
        </h1>
        {found?.state === "running" && may("operator") && (
          <button type="button" class="button is-danger" onClick={() => (aborting.value = true)}>
            <Icon name="stop" /> Abort
          </button>
        )}
      </div>
      <View
        of={request}
        skeleton={<SkeletonRows rows={6} />}
        otherwise={
          <a class="button" href={href(["requests"])}>
            All requests
          </a>
        }
      >
        {(item) => <Facts request={item} />}
      </View>
      {aborting.value && found && <AbortDialog request={found} onClose={() => (aborting.value = false)} onDone={request.refresh} />}
    </>
  );
}

function Facts({ request }: { request: RequestItem }) {
  const tenant = otherTenant(request.tenant);
  return (
    <div class="stack">
      <section class="panel panel-body">
        <h2 class="section-title">Time breakdown</h2>
        <TimeBar request={request} />
      </section>
      <dl class="facts panel panel-body">
        <dt>ID</dt>
        <dd class="cluster">
          <code>{request.id}</code> <CopyButton text={request.id} label="Copy the request ID" />
        </dd>
        <dt>Received</dt>
        <dd class="num">{dateTime(request.at)}</dd>
        <dt>Model</dt>
        <dd>
          {request.adapter ? (
            <a href={href(["adapters", request.adapter], { tenant, v: request.version == null ? null : String(request.version) })}>
              {request.adapter}
              {request.version != null && ` v${request.version}`}
            </a>
          ) : (
            "the base model"
          )}
        </dd>
        <dt>Sent by</dt>
        <dd>
          tenant {request.tenant}
          {request.key_id && (
            <>
              , key{" "}
              <a href={href(["requests"], { key_id: request.key_id, tenant })}>
                <code>{request.key_id}</code>
              </a>
            </>
          )}
        </dd>
        <dt>Endpoint</dt>
        <dd>
          <code>{request.route || "–"}</code>
          {request.stream && <span class="muted">, streamed</span>}
        </dd>
        <dt>Prompt</dt>
        <dd>
          <Tokens of={request.num_prompt_tokens} /> tokens, of which <Tokens of={request.num_cached_tokens} /> from the cache
        </dd>
        <dt>Output</dt>
        <dd>
          <Tokens of={request.num_output_tokens} /> tokens
        </dd>
        {request.error && (
          <>
            <dt>Error</dt>
            <dd>
              <code>{request.error}</code>
            </dd>
          </>
        )}
      </dl>
      <p class="muted">Prompts and answers are never stored.</p>
    </div>
  );
}

function Tokens({ of }: { of: number | null }) {
  return <Amount of={of === null ? null : count(of)} />;
}

/** To scale: time queued, time to the first token, and time for the rest of the answer. */
function TimeBar({ request }: { request: RequestItem }) {
  const { queue_ms, adapter_load_ms, ttft_ms, duration_ms } = request;
  const queued = queue_ms ?? 0;
  const until = ttft_ms ?? duration_ms;
  const toFirst = until === null ? null : Math.max(0, until - queued);
  const rest = ttft_ms === null || duration_ms === null ? null : Math.max(0, duration_ms - ttft_ms);
  const ended = duration_ms !== null && ttft_ms === null;
  const parts = [
    { label: "Queued", ms: queue_ms, hue: 4 },
    { label: ended ? "Ended without a first token" : "Until the first token", ms: toFirst, hue: 1 },
    ...(ended ? [] : [{ label: "Rest of the answer", ms: rest, hue: 3 }]),
  ];
  return (
    <div class="time-bar">
      <div class="gauge" aria-hidden="true">
        {parts.map(({ label, ms, hue }) => (
          <span key={label} style={{ flexGrow: ms ?? 0, background: `var(--hue-${hue})` }} />
        ))}
      </div>
      <ul class="bars-legend small">
        {parts.map(({ label, ms, hue }) => (
          <li key={label}>
            <span class="swatch" style={{ background: `var(--hue-${hue})` }} aria-hidden="true" />
            {label} <Amount of={ms === null ? null : milliseconds(ms)} />
          </li>
        ))}
        <li>
          Total <Amount of={duration_ms === null ? null : milliseconds(duration_ms)} />
        </li>
        {adapter_load_ms !== null && adapter_load_ms > 0 && (
          <li class="muted">
            loading the adapter took <Amount of={milliseconds(adapter_load_ms)} />
          </li>
        )}
      </ul>
    </div>
  );
}

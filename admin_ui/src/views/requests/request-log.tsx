import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { RequestItem } from "../../api/types";
import { Amount, Chip, CopyButton, type Tone } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { ago, count, dateTime, milliseconds } from "../../parts/format";
import { Icon, type IconName } from "../../parts/icon";
import { Empty, Failure, SkeletonRows } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { href, place } from "../../router";
import { usePaged } from "../../state/paged";
import { may } from "../../state/session";
import { FilterBar } from "./filter-bar";

const STATES = ["running", "stop", "length", "abort", "error", "lost"];
const MARK: Record<string, { tone: Tone; icon: IconName }> = {
  running: { tone: "accent", icon: "play" },
  stop: { tone: "ok", icon: "check" },
  length: { tone: "ok", icon: "check" },
  abort: { tone: "neutral", icon: "stop" },
  error: { tone: "bad", icon: "cross" },
  lost: { tone: "bad", icon: "warn" },
};
const REFRESH_MS = 4000;

export function RequestLog() {
  const query = new URLSearchParams([...place.value.query].filter(([name, value]) => value && ["adapter", "state", "key_id"].includes(name)));
  const list = usePaged<RequestItem>(`/v1/requests${query.size ? `?${query}` : ""}`, 100, REFRESH_MS);
  const aborting = useSignal<RequestItem | null>(null);
  const rows = list.rows.value;
  return (
    <>
      <FilterBar
        fields={[
          { name: "adapter", label: "Adapter" },
          { name: "key_id", label: "Key" },
        ]}
        choices={{ name: "state", label: "Any state", values: STATES }}
        exported={rows ?? []}
        fileName="requests.json"
      />
      {rows === null && (list.error.value ? <Failure error={list.error.value} retry={list.refresh} /> : <SkeletonRows />)}
      {rows?.length === 0 && (
        <Empty icon="requests" title={query.size ? "No request matches" : "No requests yet"} command={`curl ${window.location.origin}/v1/models`}>
          Prompts and answers are never kept: only who asked, for what, and how long it took.
        </Empty>
      )}
      {rows !== null && rows.length > 0 && (
        <div class="panel scroll-x">
          <table class="table log-table is-cards">
            <caption class="visually-hidden">Requests, newest first</caption>
            <thead>
              <tr>
                <th>When</th>
                <th>State</th>
                <th>Adapter</th>
                <th>Tenant</th>
                <th>Key</th>
                <th class="right">Prompt</th>
                <th class="right">Cached</th>
                <th class="right">Output</th>
                <th class="right">Queued</th>
                <th class="right">TTFT</th>
                <th class="right">Took</th>
                <th>
                  <span class="visually-hidden">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {rows.map((row) => (
                <Row key={row.id} row={row} onAbort={may("operator") && row.state === "running" ? () => (aborting.value = row) : null} />
              ))}
            </tbody>
          </table>
        </div>
      )}
      {list.hasMore.value && (
        <button type="button" class="button more" onClick={list.loadMore}>
          Older requests
        </button>
      )}
      {aborting.value && (
        <Dialog
          title="Abort this request?"
          confirm="Abort it"
          danger
          onClose={() => (aborting.value = null)}
          onConfirm={async () => {
            await call("DELETE", `/v1/requests/${encodeURIComponent(aborting.value?.id ?? "")}`);
            toast("Aborted.");
            list.refresh();
          }}
        >
          <p>Its stream ends with an error. Tokens delivered so far are billed.</p>
        </Dialog>
      )}
    </>
  );
}

function Row({ row, onAbort }: { row: RequestItem; onAbort: (() => void) | null }) {
  const mark = MARK[row.state] ?? { tone: "neutral" as Tone, icon: "info" as IconName };
  const time = (value: number | null | undefined) => <Amount of={value == null ? null : milliseconds(value)} />;
  const number = (value: number | null | undefined) => <Amount of={value == null ? null : count(value)} />;
  return (
    <tr data-testid="request-row">
      <td class="num" title={dateTime(row.at)}>
        {ago(row.at)}
      </td>
      <td data-label="State" title={row.error ?? undefined}>
        <Chip tone={mark.tone} icon={mark.icon}>
          {row.error ?? row.state}
        </Chip>
      </td>
      <td data-label="Adapter">
        {row.adapter ? (
          <a href={href(["adapters", row.adapter], { v: row.version == null ? null : String(row.version) })}>
            {row.adapter}
            {row.version != null && ` v${row.version}`}
          </a>
        ) : (
          <span class="muted">base model</span>
        )}
      </td>
      <td data-label="Tenant">{row.tenant}</td>
      <td data-label="Key">
        <code>{row.key_id ?? "–"}</code>
      </td>
      <td class="right" data-label="Prompt">{number(row.num_prompt_tokens)}</td>
      <td class="right" data-label="Cached">{number(row.num_cached_tokens)}</td>
      <td class="right" data-label="Output">{number(row.num_output_tokens)}</td>
      <td class="right" data-label="Queued">{time(row.queue_ms)}</td>
      <td class="right" data-label="TTFT">{time(row.ttft_ms)}</td>
      <td class="right" data-label="Took">{time(row.duration_ms)}</td>
      <td class="row-actions">
        <CopyButton text={row.id} label="Copy the request's id" />
        {onAbort && (
          <button type="button" class="button is-quiet is-icon" aria-label="Abort" onClick={onAbort}>
            <Icon name="stop" />
          </button>
        )}
      </td>
    </tr>
  );
}

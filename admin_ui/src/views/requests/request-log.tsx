import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import { saveBlob } from "../../api/download";
import type { Page, RequestItem } from "../../api/types";
import { Amount, CopyButton } from "../../parts/basics";
import { curlRequest } from "../../parts/commands";
import { ago, count, dateTime, milliseconds } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { Empty, ListView, SkeletonRows } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { href, place } from "../../router";
import { usePaged } from "../../state/paged";
import { may, mayActForAll, otherTenant, session, shownTenant } from "../../state/session";
import { AbortDialog } from "./abort-dialog";
import { FilterBar } from "./filter-bar";
import { RequestState, STATES } from "./request-state";

const REFRESH_MS = 4000;
const EXPORTED_AT_ONCE = 500;
const MAX_EXPORTED = 10_000;
const FILTERS = ["adapter", "state", "key_id", "tenant"];

export function RequestLog() {
  const query = new URLSearchParams([...place.value.query].filter(([name, value]) => value && FILTERS.includes(name)));
  const path = `/v1/requests${query.size ? `?${query}` : ""}`;
  const list = usePaged<RequestItem>(path, 100, REFRESH_MS);
  const aborting = useSignal<RequestItem | null>(null);
  const exporting = useSignal(false);

  async function exportAll(): Promise<void> {
    exporting.value = true;
    try {
      const rows = await everyRow(path);
      saveBlob(new Blob([JSON.stringify(rows, null, 2)], { type: "application/json" }), "requests.json");
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    } finally {
      exporting.value = false;
    }
  }

  return (
    <>
      <FilterBar
        fields={[
          { name: "adapter", label: "Adapter" },
          { name: "key_id", label: "Key" },
        ]}
        choices={[
          { name: "state", label: "Any state", values: STATES.map((state) => [state, state] as const) },
          ...(mayActForAll.value ? [{ name: "tenant", label: `Tenant ${shownTenant.value}`, values: tenantChoices(query.get("tenant")) }] : []),
        ]}
      >
        <button type="button" class="button" disabled={exporting.value || !list.rows.value?.length} onClick={() => void exportAll()}>
          <Icon name="file" /> Export
        </button>
      </FilterBar>
      <ListView of={list} skeleton={<SkeletonRows />} older="Older requests">
        {(rows) =>
          rows.length === 0 ? (
            <Empty icon="requests" title={query.size ? "No matching requests" : "No requests yet"} command={curlRequest(query.get("adapter") ?? session.value?.model ?? "")}>
              Prompts and answers are never stored, only who sent a request, to which model, and how long it took.
            </Empty>
          ) : (
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
                    <th class="right">Duration</th>
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
          )
        }
      </ListView>
      {aborting.value && <AbortDialog request={aborting.value} onClose={() => (aborting.value = null)} onDone={list.refresh} />}
    </>
  );
}

/** The newest matching requests, at most MAX_EXPORTED, not only those on the page. */
async function everyRow(path: string): Promise<RequestItem[]> {
  const rows: RequestItem[] = [];
  let cursor: string | null = null;
  do {
    const after: string = cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
    const { data }: { data: Page<RequestItem> } = await call("GET", `${path}${path.includes("?") ? "&" : "?"}limit=${EXPORTED_AT_ONCE}${after}`);
    rows.push(...data.data);
    cursor = data.next_cursor;
  } while (cursor !== null && rows.length < MAX_EXPORTED);
  return rows;
}

function tenantChoices(asked: string | null): (readonly [string, string])[] {
  const named = asked && asked !== "*" ? [[asked, `Tenant ${asked}`] as const] : [];
  return [...named, ["*", "All tenants"] as const];
}

function Row({ row, onAbort }: { row: RequestItem; onAbort: (() => void) | null }) {
  const time = (value: number | null | undefined) => <Amount of={value == null ? null : milliseconds(value)} />;
  const number = (value: number | null | undefined) => <Amount of={value == null ? null : count(value)} />;
  const tenant = otherTenant(row.tenant);
  return (
    <tr data-testid="request-row">
      <td class="num" title={dateTime(row.at)}>
        <a href={href(["requests", row.id], { tenant })}>{ago(row.at)}</a>
      </td>
      <td data-label="State">
        <RequestState request={row} />
      </td>
      <td data-label="Adapter" class="adapter-cell">
        {row.adapter ? (
          <a class="truncate" title={row.adapter} href={href(["adapters", row.adapter], { tenant, v: row.version == null ? null : String(row.version) })}>
            {row.adapter}
            {row.version != null && ` v${row.version}`}
          </a>
        ) : (
          <span class="muted">base model</span>
        )}
      </td>
      <td data-label="Tenant" class="adapter-cell">
        <span class="truncate" title={row.tenant}>
          {row.tenant}
        </span>
      </td>
      <td data-label="Key">
        {row.key_id ? (
          <a href={href(["requests"], { key_id: row.key_id, tenant })}>
            <code>{row.key_id}</code>
          </a>
        ) : (
          <span class="muted">–</span>
        )}
      </td>
      <td class="right" data-label="Prompt">{number(row.num_prompt_tokens)}</td>
      <td class="right" data-label="Cached">{number(row.num_cached_tokens)}</td>
      <td class="right" data-label="Output">{number(row.num_output_tokens)}</td>
      <td class="right" data-label="Queued">{time(row.queue_ms)}</td>
      <td class="right" data-label="TTFT">{time(row.ttft_ms)}</td>
      <td class="right" data-label="Duration">{time(row.duration_ms)}</td>
      <td class="row-actions">
        {onAbort && (
          <button type="button" class="button is-quiet is-icon" aria-label="Abort" title="Abort" onClick={onAbort}>
            <Icon name="stop" />
          </button>
        )}
        <CopyButton text={row.id} label="Copy the request ID" />
      </td>
    </tr>
  );
}

import { useSignal } from "@preact/signals";

import type { UsageRow } from "../../api/types";
import { colorOf } from "../../parts/bars";
import { Amount } from "../../parts/basics";
import { count } from "../../parts/format";
import { UsageCells } from "../../parts/usage-cells";
import { go, href, place } from "../../router";
import { actFor } from "../../state/session";
import { type GroupBy, labelOf, rankedOf, tokensOf } from "./usage-stacks";

const HEADS: Record<GroupBy, string> = { adapter: "Adapter", version: "Version", key: "Key", tenant: "Tenant" };
const NUM_HUES = 5;
const NUM_ROWS = 200;

/** Each group's totals over the whole span. A name links to its breakdown, its number of requests to the request log. */
export function UsageTable({ totals, by }: { totals: UsageRow[]; by: GroupBy }) {
  const showsAll = useSignal(false);
  const ranked = rankedOf(totals);
  const rows = showsAll.value ? ranked : ranked.slice(0, NUM_ROWS);
  const all = totals.reduce((sum, row) => sum + tokensOf(row), 0);
  return (
    <div class="panel scroll-x">
      <table class="table is-cards">
        <caption class="visually-hidden">Usage by {by}</caption>
        <thead>
          <tr>
            <th>{HEADS[by]}</th>
            <th class="right">Requests</th>
            <th class="right">Errors</th>
            <th class="right">Prompt tokens</th>
            <th class="right">Cached</th>
            <th class="right">Output tokens</th>
            <th class="right">TTFT p95</th>
            <th class="right">Share of tokens</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row, index) => (
            <tr key={labelOf(row, by)} data-testid="usage-row">
              <td class="usage-name">
                <span class="swatch" style={{ background: colorOf(index < NUM_HUES ? index + 1 : null) }} aria-hidden="true" /> <Name row={row} by={by} />
              </td>
              <td class="right" data-label="Requests">
                <Requests row={row} by={by} />
              </td>
              <td class="right" data-label="Errors">
                {row.num_errors > 0 ? <span class="bad num">{row.num_errors}</span> : <span class="muted">0</span>}
              </td>
              <UsageCells row={row} />
              <td class="right" data-label="Share of tokens">
                <Amount of={all > 0 ? { value: ((100 * tokensOf(row)) / all).toFixed(1), unit: "%" } : null} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {ranked.length > rows.length && (
        <button type="button" class="button is-quiet show-all" onClick={() => (showsAll.value = true)}>
          Show all {ranked.length} rows
        </button>
      )}
    </div>
  );
}

/** Links to the next level of detail: a tenant's adapters, an adapter's versions, a version's keys, a key's adapters. */
function Name({ row, by }: { row: UsageRow; by: GroupBy }) {
  const label = labelOf(row, by);
  const here = place.value.segments;
  const span = place.value.query.get("span");
  if (by === "tenant") {
    const tenant = row.tenant ?? "";
    return (
      <button type="button" class="link" onClick={() => (actFor(tenant), go(href(here, { span })))}>
        {label}
      </button>
    );
  }
  if (by === "key") return row.key_id ? <a href={href(here, { span, key_id: row.key_id })}>{label}</a> : <span>{label}</span>;
  if (!row.adapter) return <span>{label}</span>;
  return <a href={href(here, { span, adapter: row.adapter, by: by === "version" ? "key" : "version" })}>{label}</a>;
}

function Requests({ row, by }: { row: UsageRow; by: GroupBy }) {
  const amount = <Amount of={count(row.num_requests)} />;
  const query = place.value.query;
  const wanted = { adapter: query.get("adapter"), key_id: query.get("key_id") };
  if (by === "tenant") return <a href={href(["requests"], { tenant: row.tenant })}>{amount}</a>;
  if (by === "key") return row.key_id ? <a href={href(["requests"], { ...wanted, key_id: row.key_id })}>{amount}</a> : amount;
  // The request log lists shared adapters by their bare name.
  return row.adapter ? <a href={href(["requests"], { ...wanted, adapter: row.adapter.split("/").at(-1) })}>{amount}</a> : amount;
}

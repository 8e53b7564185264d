import "../../parts/charts.css";

import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { UsageReport, UsageRow } from "../../api/types";
import { Amount } from "../../parts/basics";
import { curlRequest } from "../../parts/commands";
import { count, hourOf } from "../../parts/format";
import { Empty, SkeletonRows, View } from "../../parts/states";
import { UsageCells } from "../../parts/usage-cells";
import { href } from "../../router";
import { usePolled } from "../../state/polled";
import { tenantHeaders } from "../../state/session";
import { DAY_S, UsageCharts } from "../usage/usage-charts";

const REFRESH_MS = 15_000;
const NUM_ROWS = 12;

/** The last 24 hours by hour and version, from the usage log. */
export function Traffic({ name, tenant }: { name: string; tenant: string }) {
  const usage = usePolled(
    `${tenant}/${name}/usage`,
    async (signal) => {
      const to = Math.ceil(Date.now() / 1000);
      const from = to - DAY_S;
      const ask = async (interval: string) => {
        const query = new URLSearchParams({ adapter: name, from: String(from), to: String(to), interval, group_by: "version" });
        return (await call<UsageReport>("GET", `/v1/usage?${query}`, { signal, headers: tenantHeaders(tenant) })).data;
      };
      const [report, totals] = await Promise.all([ask("hour"), ask("total")]);
      return { report, totals: totals.data, from, to };
    },
    REFRESH_MS,
  );
  return (
    <View of={usage} skeleton={<SkeletonRows rows={5} />}>
      {({ report, totals, from, to }) =>
        report.data.length === 0 ? (
          <NoTraffic name={name} tenant={tenant} />
        ) : (
          <div class="stack">
            <UsageCharts rows={ofVersions(report.data, name)} totals={ofVersions(totals, name)} by="version" from={from} to={to} interval="hour" />
            <Rows report={report} name={name} />
          </div>
        )
      }
    </View>
  );
}

function NoTraffic({ name, tenant }: { name: string; tenant: string }) {
  return (
    <Empty icon="live" title="No requests in the last 24 hours" command={curlRequest(name, tenant)}>
      Requests, tokens and latencies appear here by hour and version.
    </Empty>
  );
}

/** The rows were requested for one adapter and do not name it; the charts need the name. */
function ofVersions(rows: UsageRow[], name: string): UsageRow[] {
  return rows.map((row) => ({ ...row, adapter: name }));
}

function Rows({ report, name }: { report: UsageReport; name: string }) {
  const all = useSignal(false);
  const newest = [...report.data].sort((a, b) => b.start - a.start);
  const rows = all.value ? newest : newest.slice(0, NUM_ROWS);
  const most = Math.max(...rows.map((row) => row.num_requests));
  return (
    <div class="panel scroll-x">
      <table class="table is-cards">
        <caption class="visually-hidden">Requests by hour and version</caption>
        <thead>
          <tr>
            <th>Hour</th>
            <th>Version</th>
            <th class="right">Requests</th>
            <th class="right">Errors</th>
            <th class="right">Prompt tokens</th>
            <th class="right">Cached</th>
            <th class="right">Output tokens</th>
            <th class="right">TTFT p95</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={`${row.start} ${row.version}`}>
              <td class="num">
                <a href={href(["requests"], { adapter: name })}>{hourOf(row.start)}</a>
              </td>
              <td class="num" data-label="Version">v{row.version}</td>
              <td class="right" data-label="Requests">
                <span class="bar" style={{ width: `${(72 * row.num_requests) / most}px` }} aria-hidden="true" /> <Amount of={count(row.num_requests)} />
              </td>
              <td class="right" data-label="Errors">{row.num_errors > 0 ? <span class="bad">{row.num_errors}</span> : <span class="muted">0</span>}</td>
              <UsageCells row={row} />
            </tr>
          ))}
        </tbody>
      </table>
      {newest.length > rows.length && (
        <button type="button" class="button is-quiet show-all" onClick={() => (all.value = true)}>
          Show all {newest.length} rows
        </button>
      )}
    </div>
  );
}

import { call } from "../../api/client";
import type { UsageReport } from "../../api/types";
import { Amount } from "../../parts/basics";
import { count, milliseconds } from "../../parts/format";
import { Empty, SkeletonRows, View } from "../../parts/states";
import { href } from "../../router";
import { usePolled } from "../../state/polled";
import { tenantHeaders } from "../../state/session";

const DAY_S = 86_400;
const REFRESH_MS = 15_000;

/** The last day by hour and version, from the usage log. */
export function Traffic({ name, tenant }: { name: string; tenant: string }) {
  const usage = usePolled(
    `${tenant}/${name}/usage`,
    async (signal) => {
      const from = Math.floor(Date.now() / 1000) - DAY_S;
      const query = new URLSearchParams({ adapter: name, from: String(from), interval: "hour", group_by: "version" });
      return (await call<UsageReport>("GET", `/v1/usage?${query}`, { signal, headers: tenantHeaders(tenant) })).data;
    },
    REFRESH_MS,
  );
  return (
    <View of={usage} skeleton={<SkeletonRows rows={5} />}>
      {(report) => (report.data.length === 0 ? <NoTraffic name={name} /> : <Rows report={report} name={name} />)}
    </View>
  );
}

function NoTraffic({ name }: { name: string }) {
  return (
    <Empty
      icon="live"
      title="No requests in the last 24 hours"
      command={`curl ${window.location.origin}/v1/completions -H 'Content-Type: application/json' -d '{"model": "${name}", "prompt": "Hello"}'`}
    />
  );
}

function Rows({ report, name }: { report: UsageReport; name: string }) {
  const rows = [...report.data].sort((a, b) => b.start - a.start);
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
                <a href={href(["requests"], { adapter: name })}>{new Date(row.start * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })}</a>
              </td>
              <td class="num" data-label="Version">v{row.version}</td>
              <td class="right" data-label="Requests">
                <span class="bar" style={{ width: `${(72 * row.num_requests) / most}px` }} aria-hidden="true" /> <Amount of={count(row.num_requests)} />
              </td>
              <td class="right" data-label="Errors">{row.num_errors > 0 ? <span class="bad">{row.num_errors}</span> : <span class="muted">0</span>}</td>
              <td class="right" data-label="Prompt tokens">
                <Amount of={count(row.num_prompt_tokens)} />
              </td>
              <td class="right" data-label="Cached">
                <Amount of={count(row.num_cached_tokens)} />
              </td>
              <td class="right" data-label="Output tokens">
                <Amount of={count(row.num_output_tokens)} />
              </td>
              <td class="right" data-label="TTFT p95">
                <Amount of={row.ttft_p95_ms === null ? null : milliseconds(row.ttft_p95_ms)} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

import "./usage.css";
import "../../parts/charts.css";

import { ApiError, call } from "../../api/client";
import { download } from "../../api/download";
import type { UsageReport } from "../../api/types";
import { curlRequest } from "../../parts/commands";
import { Icon } from "../../parts/icon";
import { Empty, SkeletonRows, View } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { place, setQuery } from "../../router";
import { usePolled } from "../../state/polled";
import { mayActForAll, session, shownTenant } from "../../state/session";
import { DAY_S, UsageCharts } from "./usage-charts";
import { type GroupBy, GROUPS, totalsOf } from "./usage-stacks";
import { UsageTable } from "./usage-table";

const SPANS = [
  { span: "24h", title: "24 h", days: 1, interval: "hour" },
  { span: "7d", title: "7 days", days: 7, interval: "hour" },
  { span: "30d", title: "30 days", days: 30, interval: "day" },
] as const;
const REFRESH_MS = 15_000;
/** For a week or more: the server sums thousands of counters for it. */
const REFRESH_LONG_MS = 60_000;

/** A tenant's usage over time, by adapter, version or key; with a key for all tenants, also by tenant. */
export function Usage() {
  const query = place.value.query;
  const span = SPANS.find((known) => known.span === query.get("span")) ?? SPANS[0];
  const by = groupBy(query.get("by"));
  // A week of hours for all tenants would be tens of thousands of counters; days are enough.
  const byDay = by === "tenant" && span.days > 1;
  const interval = byDay ? "day" : span.interval;
  const filters = new URLSearchParams([...query].filter(([name, value]) => value && ["adapter", "key_id"].includes(name)));
  const usage = usePolled(
    `usage ${span.span} ${by} ${filters}`,
    async (signal) => {
      const to = Math.ceil(Date.now() / 1000);
      const from = to - span.days * DAY_S;
      const ask = async (asked: string, groups = GROUPS[by]) =>
        (await call<UsageReport>("GET", usagePath({ from, to, interval: asked, groups, filters }), { signal })).data;
      let isSplit = true;
      const steps = await ask(interval).catch((error: unknown) => {
        if (by === "tenant" || !hasTooManyRows(error)) throw error;
        isSplit = false;
        return ask(interval, "");
      });
      const totals = byDay ? totalsOf(steps.data, by) : (await ask("total")).data;
      return { from, to, rows: steps.data, totals, complete: steps.complete, isSplit };
    },
    span.days > 1 ? REFRESH_LONG_MS : REFRESH_MS,
  );

  function exportCsv(): void {
    const to = Math.ceil(Date.now() / 1000);
    const path = usagePath({ from: to - span.days * DAY_S, to, interval, groups: GROUPS[by], filters });
    download(`${path}&format=csv`, `usage-${by === "tenant" ? "all" : shownTenant.value}-${span.span}.csv`).catch((error: unknown) =>
      toast(error instanceof Error ? error.message : String(error)),
    );
  }

  return (
    <>
      <div class="filters usage-filters">
        <Choice label="Time range" value={span.span} options={SPANS.map((known) => [known.span, known.title])} onChoose={(next) => setQuery({ span: next })} />
        <Choice label="Group by" value={by} options={groups().map((known) => [known, known])} onChoose={(next) => setQuery({ by: next })} />
        {[...filters].map(([name, value]) => (
          <button key={name} type="button" class="button" aria-label={`Remove the filter ${value}`} onClick={() => setQuery({ [name]: null })}>
            {name === "key_id" ? "Key" : "Adapter"}: <span class="truncate">{value}</span> <Icon name="cross" />
          </button>
        ))}
        <button type="button" class="button" onClick={exportCsv}>
          <Icon name="file" /> Export CSV
        </button>
      </div>
      <View of={usage} skeleton={<SkeletonRows rows={6} height={56} />}>
        {({ from, to, rows, totals, complete, isSplit }) => (
          <div class="stack">
            {!complete && (
              <p class="stale-note" role="status">
                <Icon name="clock" /> Older logs are still being counted; these numbers will grow for a while.
              </p>
            )}
            {totals.length === 0 ? (
              <Empty icon="overview" title={`No usage in the last ${span.title}`} command={curlRequest(session.value?.model ?? "")}>
                Tokens and requests are counted when a request ends.
              </Empty>
            ) : (
              <>
                {!isSplit && <p class="muted">There are too many {by}s to chart each of them.</p>}
                <UsageCharts rows={rows} totals={isSplit ? totals : []} by={by} from={from} to={to} interval={interval} />
                <UsageTable totals={totals} by={by} />
              </>
            )}
          </div>
        )}
      </View>
    </>
  );
}

interface Asked {
  from: number;
  to: number;
  interval: string;
  groups: string;
  filters: URLSearchParams;
}

function usagePath({ from, to, interval, groups, filters }: Asked): string {
  const query = new URLSearchParams({ from: String(from), to: String(to), interval, group_by: groups });
  return `/v1/usage?${query}${filters.size > 0 ? `&${filters}` : ""}`;
}

/** The server limits the rows of an answer. */
function hasTooManyRows(error: unknown): boolean {
  return error instanceof ApiError && error.status === 400 && error.param === "group_by";
}

function groups(): GroupBy[] {
  return mayActForAll.value ? ["adapter", "version", "key", "tenant"] : ["adapter", "version", "key"];
}

function groupBy(asked: string | null): GroupBy {
  return groups().find((known) => known === asked) ?? "adapter";
}

interface ChoiceProps {
  label: string;
  value: string;
  options: (readonly [string, string])[];
  onChoose: (value: string) => void;
}

function Choice({ label, value, options, onChoose }: ChoiceProps) {
  return (
    <div class="segmented" role="group" aria-label={label} title={label}>
      {options.map(([option, title]) => (
        <button key={option} type="button" aria-pressed={option === value} onClick={() => onChoose(option)}>
          {title}
        </button>
      ))}
    </div>
  );
}

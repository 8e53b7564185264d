import type { UsageRow } from "../../api/types";
import { Bars } from "../../parts/bars";
import { count, dayOf, hourOf } from "../../parts/format";
import { type GroupBy, labelOf, rankedOf, stacksOf, startsOf, tokensOf } from "./usage-stacks";

const HOUR_S = 3600;
export const DAY_S = 86_400;

interface UsageChartsProps {
  rows: UsageRow[];
  totals: UsageRow[];
  by: GroupBy;
  from: number;
  to: number;
  interval: "hour" | "day";
}

/** Tokens and requests over time, one color per group. */
export function UsageCharts({ rows, totals, by, from, to, interval }: UsageChartsProps) {
  const starts = startsOf(from, to, interval === "hour" ? HOUR_S : DAY_S);
  const ranked = rankedOf(totals).map((row) => labelOf(row, by));
  const severalDays = to - from > DAY_S;
  const when = (start: number): string => (interval === "day" ? dayOf(start, true) : hourOf(start, severalDays));
  const tick = interval === "hour" && severalDays ? (start: number) => dayOf(start) : when;
  const shared = { starts, format: (value: number) => count(Math.round(value * 10) / 10), when, tick };
  return (
    <div class="charts">
      <section class="panel chart-panel">
        <h2>Prompt and output tokens by {interval}</h2>
        <Bars title="Tokens" stacks={stacksOf(rows, by, ranked, starts, tokensOf)} {...shared} />
      </section>
      <section class="panel chart-panel">
        <h2>Requests by {interval}</h2>
        <Bars title="Requests" stacks={stacksOf(rows, by, ranked, starts, (row) => row.num_requests)} {...shared} />
      </section>
    </div>
  );
}

import "../../parts/charts.css";

import { call } from "../../api/client";
import type { SeriesView } from "../../api/types";
import { Chart } from "../../parts/chart";
import { count, percent } from "../../parts/format";
import { SkeletonRows, View } from "../../parts/states";
import { place, setQuery } from "../../router";
import { usePolled } from "../../state/polled";

const WINDOWS = [
  { window: "15m", title: "15 min" },
  { window: "1h", title: "1 h" },
  { window: "24h", title: "24 h" },
];
const REFRESH_MS = 5000;

/** Helps judge whether the adapter memory is large enough: how full it was, and how often adapters were evicted. */
export function MemoryHistory() {
  const window = WINDOWS.find((known) => known.window === place.value.query.get("window"))?.window ?? "15m";
  const series = usePolled(
    `series ${window}`,
    async (signal) => (await call<SeriesView>("GET", `/v1/series?window=${window}`, { signal })).data,
    REFRESH_MS,
  );
  return (
    <section aria-labelledby="memory-history" data-testid="memory-history">
      <div class="section-head">
        <h2 id="memory-history">Adapter memory over time</h2>
        <div class="segmented" role="group" aria-label="Time range">
          {WINDOWS.map(({ window: value, title }) => (
            <button key={value} type="button" aria-pressed={value === window} onClick={() => setQuery({ window: value })}>
              {title}
            </button>
          ))}
        </div>
      </div>
      <View of={series} skeleton={<SkeletonRows rows={3} height={60} />}>
        {(found) => (isShared(found) ? <Charts series={found} /> : <p class="muted">Tenants share this memory. Its history is visible only with a key for all tenants.</p>)}
      </View>
    </section>
  );
}

/** Whether the series has shared values: with a key of one tenant they are always null. A server without requests yet has no data for anyone. */
function isShared(series: SeriesView): boolean {
  const measured = series.requests_per_s.some((value) => value !== null);
  return !measured || series.arena_used.some((value) => value !== null);
}

function Charts({ series }: { series: SeriesView }) {
  return (
    <div class="charts">
      <section class="panel chart-panel">
        <h3>Loads and evictions per {series.step_s} s</h3>
        <Chart
          title="Loads and evictions"
          at={series.at}
          lines={[
            { label: "Loaded", values: series.num_adapter_loads, filled: true },
            { label: "Evicted", values: series.num_adapter_evictions, hue: 5 },
          ]}
          format={(value) => count(Math.round(value * 10) / 10)}
        />
      </section>
      <section class="panel chart-panel">
        <h3>Adapter memory in use</h3>
        <Chart title="Adapter memory in use" at={series.at} lines={[{ label: "In use", values: series.arena_used, filled: true, hue: 2 }]} format={percent} top={1} />
      </section>
    </div>
  );
}

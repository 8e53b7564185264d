import "./overview.css";

import { call } from "../../api/client";
import type { LiveView, SeriesView } from "../../api/types";
import { SkeletonRows, View } from "../../parts/states";
import { place, setQuery } from "../../router";
import { usePolled } from "../../state/polled";
import { Charts } from "./charts";
import { Now } from "./now";

const WINDOWS = [
  { window: "15m", title: "15 min" },
  { window: "1h", title: "1 h" },
  { window: "24h", title: "24 h" },
];
const FINE_MS = 5000;
const COARSE_MS = 30_000;

/** The server's health: its current state, and charts of the last 15 minutes to 24 hours. */
export function Overview() {
  const window = place.value.query.get("window") ?? "15m";
  const live = usePolled("live", async (signal) => (await call<LiveView>("GET", "/v1/live", { signal })).data);
  const series = usePolled(
    `series ${window}`,
    async (signal) => (await call<SeriesView>("GET", `/v1/series?window=${encodeURIComponent(window)}`, { signal })).data,
    window === "24h" ? COARSE_MS : FINE_MS,
  );
  return (
    <>
      <div class="page-head">
        <h1>Overview</h1>
        <div class="segmented" role="group" aria-label="Time range">
          {WINDOWS.map(({ window: value, title }) => (
            <button key={value} type="button" aria-pressed={value === window} onClick={() => setQuery({ window: value })}>
              {title}
            </button>
          ))}
        </div>
      </div>
      <View of={live} skeleton={<div class="tiles">{Array.from({ length: 8 }, (_, index) => <div key={index} class="tile skeleton" />)}</div>}>
        {(found) => <Now live={found} series={series.data.value} />}
      </View>
      <div class="overview-charts">
        <View of={series} skeleton={<SkeletonRows rows={6} height={60} />}>
          {(found) => <Charts series={found} />}
        </View>
      </div>
    </>
  );
}

import "../../parts/charts.css";

import type { SeriesView } from "../../api/types";
import { Chart, type Line } from "../../parts/chart";
import { count, milliseconds, percent, type Quantity } from "../../parts/format";

interface ChartOf {
  title: string;
  lines: (series: SeriesView) => Line[];
  format: (value: number) => Quantity;
  top?: number;
}

const CHARTS: ChartOf[] = [
  {
    title: "Tokens per second",
    lines: (series) => [
      { label: "Output", values: series.output_tokens_per_s, filled: true },
      { label: "Prompt", values: series.prompt_tokens_per_s, hue: 2 },
    ],
    format: (value) => count(Math.round(value)),
  },
  {
    title: "Sequences",
    lines: (series) => [
      { label: "Running", values: series.num_running, filled: true },
      { label: "Waiting", values: series.num_waiting, hue: 4 },
    ],
    format: (value) => count(Math.round(value * 10) / 10),
  },
  {
    title: "Time to first token",
    lines: (series) => [
      { label: "p50", values: series.ttft_p50_ms },
      { label: "p95", values: series.ttft_p95_ms, hue: 6 },
    ],
    format: milliseconds,
  },
  {
    title: "Time between tokens",
    lines: (series) => [
      { label: "p50", values: series.itl_p50_ms },
      { label: "p95", values: series.itl_p95_ms, hue: 6 },
    ],
    format: milliseconds,
  },
  {
    title: "Memory and cache",
    lines: (series) => [
      { label: "KV cache in use", values: series.kv_used },
      { label: "Adapter memory", values: series.arena_used, hue: 2 },
      { label: "Prompt tokens from cache", values: series.cache_hit, hue: 3 },
    ],
    format: percent,
    top: 1,
  },
  {
    title: "Requests and errors per second",
    lines: (series) => [
      { label: "Requests", values: series.requests_per_s },
      { label: "Errors", values: series.errors_per_s, hue: 5 },
    ],
    format: (value) => ({ value: value.toFixed(value > 0 && value < 10 ? 1 : 0), unit: "/s" }),
  },
];

export function Charts({ series }: { series: SeriesView }) {
  return (
    <div class="charts">
      {CHARTS.map(({ title, lines, format, top }) => (
        <section key={title} class="panel chart-panel">
          <h2>{title}</h2>
          <Chart title={title} at={series.at} lines={lines(series)} format={format} {...(top === undefined ? {} : { top })} />
        </section>
      ))}
    </div>
  );
}

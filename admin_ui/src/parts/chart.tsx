import "./chart.css";
import "uplot/dist/uPlot.min.css";

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

import { theme } from "../state/theme";
import type { Quantity } from "./format";

export interface Line {
  label: string;
  values: (number | null)[];
  /** One of the six identity hues; omitted = the accent color. */
  hue?: 1 | 2 | 3 | 4 | 5 | 6;
  /** Fills the area down to the axis. */
  filled?: boolean;
}

interface ChartProps {
  title: string;
  /** Unix seconds. */
  at: number[];
  lines: Line[];
  format: (value: number) => Quantity;
  /** Top of the vertical axis, for shares; by default the axis fits the data. */
  top?: number;
}

const HEIGHT = 148;
const AXIS_SIZE = 46;
const TIME_AXIS_SIZE = 24;

/** A time series chart. Hovering shows the values at one moment; missing values leave gaps. */
export function Chart({ title, at, lines, format, top }: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const shape = lines.map((line) => line.label).join();

  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const made = new uPlot(options(title, lines, format, top, element), data(at, lines), element);
    plot.current = made;
    showLatest(made);
    const resized = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape, theme.value]);

  useEffect(() => {
    const shown = plot.current;
    if (!shown) return;
    shown.setData(data(at, lines));
    if (shown.cursor.left === undefined || shown.cursor.left < 0) showLatest(shown);
  }, [at, lines]);

  const last = lines.map((line) => `${line.label} ${text(line.values.findLast((value) => value !== null) ?? null, format)}`);
  return (
    <figure class="chart" role="img" aria-label={`${title}, latest: ${last.join(", ")}`}>
      <div ref={place} />
    </figure>
  );
}

function options(title: string, lines: Line[], format: (value: number) => Quantity, top: number | undefined, element: HTMLElement): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const color = (name: string): string => style.getPropertyValue(name).trim();
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width: element.clientWidth,
    height: HEIGHT,
    padding: [8, 18, 0, 0],
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    legend: { live: true },
    hooks: {
      setCursor: [
        (plot) => {
          if (plot.cursor.left === undefined || plot.cursor.left < 0) showLatest(plot);
        },
      ],
    },
    scales: { y: { range: (_plot, _min, max) => [0, top ?? (max > 0 ? max * 1.1 : 1)] } },
    axes: [
      { ...axis, size: TIME_AXIS_SIZE, space: 64, values: (_plot, ticks) => ticks.map(clock) },
      { ...axis, size: AXIS_SIZE, space: 32, values: (_plot, ticks) => ticks.map((tick) => text(tick, format)) },
    ],
    series: [
      { label: "Time", value: (_plot, value) => (value === null ? "" : new Date(value * 1000).toLocaleTimeString(undefined, { hourCycle: "h23" })) },
      ...lines.map((line) => {
        const stroke = color(line.hue ? `--hue-${line.hue}` : "--accent");
        return {
          label: line.label,
          stroke,
          width: 1.5,
          ...(line.filled ? { fill: `color-mix(in oklab, ${stroke} 14%, transparent)` } : {}),
          points: { show: true, size: 4, fill: stroke, filter: alone },
          value: (_plot: uPlot, value: number | null) => text(value, format),
        };
      }),
    ],
    id: title.replaceAll(/\W+/g, "-"),
  };
}

/** The time of day in 24-hour format, whatever the browser's language. */
function clock(unixS: number): string {
  return new Date(unixS * 1000).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
}

/** Samples with a gap on both sides: they make no line, so a point shows them. */
function alone(plot: uPlot, series: number): number[] {
  const values = plot.data[series] ?? [];
  const known = (index: number): boolean => values[index] !== null && values[index] !== undefined;
  return [...values.keys()].filter((index) => known(index) && !known(index - 1) && !known(index + 1));
}

/** Shows the latest values in the legend, for when nothing is hovered. */
function showLatest(plot: uPlot): void {
  const [at, ...lines] = plot.data;
  const latest = at.findLastIndex((_, index) => lines.some((line) => line[index] !== null));
  if (latest >= 0) plot.setLegend({ idx: latest }, false);
}

function data(at: number[], lines: Line[]): uPlot.AlignedData {
  return [at, ...lines.map((line) => line.values)] as uPlot.AlignedData;
}

function text(value: number | null, format: (value: number) => Quantity): string {
  if (value === null) return "–";
  const { value: shown, unit } = format(value);
  return unit ? `${shown} ${unit}` : shown;
}

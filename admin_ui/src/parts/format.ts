/** A number for people: value and unit are separate, so that the unit can be gray. */
export interface Quantity {
  value: string;
  unit: string;
}

const BYTE_UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(count: number): Quantity {
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < BYTE_UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return { value: unit === 0 ? String(value) : significant(value), unit: BYTE_UNITS[unit] ?? "" };
}

export function count(value: number): Quantity {
  if (value < 10_000) return { value: new Intl.NumberFormat("en").format(value), unit: "" };
  if (value < 1_000_000) return { value: significant(value / 1000), unit: "k" };
  return { value: significant(value / 1_000_000), unit: "M" };
}

export function milliseconds(value: number): Quantity {
  if (value < 1000) return { value: value > 0 && value < 10 ? value.toFixed(1) : String(Math.round(value)), unit: "ms" };
  return seconds(value / 1000);
}

export function seconds(value: number): Quantity {
  if (value < 60) return { value: significant(value), unit: "s" };
  if (value < 3600) return { value: String(Math.round(value / 60)), unit: "min" };
  if (value < 86_400) return { value: String(Math.round(value / 3600)), unit: "h" };
  return { value: String(Math.round(value / 86_400)), unit: "d" };
}

export function percent(fraction: number): Quantity {
  return { value: (fraction * 100).toFixed(fraction > 0 && fraction < 0.1 ? 1 : 0), unit: "%" };
}

/** unixS: seconds; "3 min ago". */
export function ago(unixS: number, nowMs = Date.now()): string {
  const elapsed = Math.max(0, nowMs / 1000 - unixS);
  if (elapsed < 5) return "just now";
  if (elapsed < 60) return `${Math.floor(elapsed)} s ago`;
  const { value, unit } = seconds(Math.floor(elapsed));
  return `${value} ${unit} ago`;
}

export function dateTime(unixS: number): string {
  return new Date(unixS * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
}

function significant(value: number): string {
  return value >= 100 ? String(Math.round(value)) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** "14:00", or with the day "Nov 21, 14:00". */
export function hourOf(unixS: number, withDay = false): string {
  const time = new Date(unixS * 1000).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  return withDay ? `${dayOf(unixS)}, ${time}` : time;
}

/** utc: for days as the server counts them, which start at midnight UTC. */
export function dayOf(unixS: number, utc = false): string {
  return new Date(unixS * 1000).toLocaleDateString(undefined, { month: "short", day: "numeric", ...(utc ? { timeZone: "UTC" } : {}) });
}

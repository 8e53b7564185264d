import type { UsageRow } from "../../api/types";
import type { Stack } from "../../parts/bars";

export type GroupBy = "adapter" | "version" | "key" | "tenant";

/** The `group_by` value of `/v1/usage` for each grouping. */
export const GROUPS: Record<GroupBy, string> = { adapter: "adapter", version: "adapter,version", key: "key", tenant: "tenant" };

const MAX_STACKS = 5;
export const OTHERS = "others";

/** The label of a row's group. */
export function labelOf(row: UsageRow, by: GroupBy): string {
  if (by === "tenant") return row.tenant ?? "";
  if (by === "key") return row.key_id ?? "no key";
  const adapter = row.adapter || "base model";
  return by === "version" && row.version != null ? `${adapter} v${row.version}` : adapter;
}

export function tokensOf(row: UsageRow): number {
  return row.num_prompt_tokens + row.num_output_tokens;
}

/** The start of every hour or day that the span touches, in UTC as the server counts them. */
export function startsOf(from: number, to: number, stepS: number): number[] {
  const first = Math.floor(from / stepS) * stepS;
  return Array.from({ length: Math.max(0, Math.ceil((to - first) / stepS)) }, (_, index) => first + index * stepS);
}

/**
 * The top groups, and the rest combined; in the order of the labels `ranked`, so that a group has the same color in all charts.
 * Without `ranked`, all rows combined.
 */
export function stacksOf(rows: UsageRow[], by: GroupBy, ranked: string[], starts: number[], measure: (row: UsageRow) => number): Stack[] {
  const named = ranked.slice(0, MAX_STACKS);
  const stepOf = new Map(starts.map((start, index) => [start, index]));
  const stacks = named.map((label, index): Stack => ({ label, values: starts.map(() => 0), hue: index + 1 }));
  const others: Stack = { label: named.length > 0 ? OTHERS : "all", values: starts.map(() => 0), hue: null };
  for (const row of rows) {
    const step = stepOf.get(row.start);
    if (step === undefined) continue;
    const stack = stacks[named.indexOf(labelOf(row, by))] ?? others;
    stack.values[step] = (stack.values[step] ?? 0) + measure(row);
  }
  return ranked.length > MAX_STACKS || named.length === 0 ? [...stacks, others] : stacks;
}

/** By number of tokens, most first; ties by number of requests. */
export function rankedOf(totals: UsageRow[]): UsageRow[] {
  return [...totals].sort((a, b) => tokensOf(b) - tokensOf(a) || b.num_requests - a.num_requests);
}

/** The rows of all steps, summed by group. Percentiles cannot be summed, so they are null. */
export function totalsOf(rows: UsageRow[], by: GroupBy): UsageRow[] {
  const totals = new Map<string, UsageRow>();
  for (const row of rows) {
    const total = totals.get(labelOf(row, by));
    totals.set(labelOf(row, by), {
      ...row,
      num_requests: row.num_requests + (total?.num_requests ?? 0),
      num_errors: row.num_errors + (total?.num_errors ?? 0),
      num_prompt_tokens: row.num_prompt_tokens + (total?.num_prompt_tokens ?? 0),
      num_cached_tokens: row.num_cached_tokens + (total?.num_cached_tokens ?? 0),
      num_output_tokens: row.num_output_tokens + (total?.num_output_tokens ?? 0),
      ttft_p50_ms: null,
      ttft_p95_ms: null,
    });
  }
  return [...totals.values()];
}

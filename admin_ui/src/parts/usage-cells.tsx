import type { UsageRow } from "../api/types";
import { Amount } from "./basics";
import { count, milliseconds } from "./format";

/** The token and time cells of a usage row: prompt, cached, output, TTFT. */
export function UsageCells({ row }: { row: UsageRow }) {
  return (
    <>
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
    </>
  );
}

import type { AdapterItem } from "../../api/types";
import { Amount } from "../../parts/basics";
import { ago, bytes, count, milliseconds } from "../../parts/format";
import { StatusChip, TierMark } from "../../parts/adapter-state";
import { href } from "../../router";
import { shownTenant } from "../../state/session";

const MAX_TARGETS = 3;

interface AdapterRowProps {
  adapter: AdapterItem;
  /** Whether the table has a selection column. */
  selectable: boolean;
  selected: boolean;
  /** Null if the user may not change this adapter. */
  onSelect: (() => void) | null;
}

export function AdapterRow(props: AdapterRowProps) {
  const { adapter, selectable, selected, onSelect } = props;
  const own = adapter.tenant === shownTenant.value;
  return (
    <tr data-testid="adapter-row" aria-selected={onSelect ? selected : undefined}>
      {selectable && (
        <td class="select-cell">
          {onSelect && (
            <label>
              <input type="checkbox" aria-label={`Select ${adapter.name}`} checked={selected} onChange={onSelect} />
            </label>
          )}
        </td>
      )}
      <td class="name-cell">
        <a href={href(["adapters", adapter.name], { tenant: own ? null : adapter.tenant })} class="strong truncate" title={adapter.name}>
          {adapter.name}
        </a>
        {!own && <span class="muted small truncate">{adapter.tenant}</span>}
      </td>
      <td class="status-cell">
        <StatusChip status={adapter.status} />
      </td>
      <td class="tier-cell">
        <TierMark tier={adapter.tier} pinned={adapter.pin !== null} />
      </td>
      <td class="right version-cell nowrap">
        {adapter.live ? `v${adapter.live.n}` : "–"}
        {adapter.canary_version !== null && (
          <span class="muted" title={`${(adapter.canary_weight_bp ?? 0) / 100}% of users get v${adapter.canary_version}`}>
            {" "}
            +v{adapter.canary_version}
          </span>
        )}
      </td>
      <td class="right">
        {adapter.live ? adapter.max_rank : "–"}
      </td>
      <td class="right size-cell">
        <Amount of={adapter.live ? bytes(adapter.size_bytes) : null} />
      </td>
      <td class="wide-only targets-cell muted" title={adapter.targets.join(", ")}>
        {adapter.targets.slice(0, MAX_TARGETS).map(shortTarget).join(", ")}
        {adapter.targets.length > MAX_TARGETS && ` +${adapter.targets.length - MAX_TARGETS}`}
      </td>
      <td class="right">
        <a class="plain" href={href(["requests"], { adapter: adapter.name })}>
          <Amount of={adapter.requests_24h === null ? null : count(adapter.requests_24h)} />
        </a>
      </td>
      <td class="right">
        <a class="plain" href={href(["adapters", adapter.name], { tenant: own ? null : adapter.tenant, tab: "traffic" })}>
          <Amount of={adapter.ttft_p95_ms === null ? null : milliseconds(adapter.ttft_p95_ms)} />
        </a>
      </td>
      <td class="right muted nowrap">
        {adapter.last_used_at === null ? "never" : ago(adapter.last_used_at)}
      </td>
    </tr>
  );
}

/** Drops the suffix “_proj”, which most targets share. */
function shortTarget(target: string): string {
  return target.replace(/_proj$/, "");
}

import type { KeyItem } from "../../api/types";
import { Amount, Chip, type Tone } from "../../parts/basics";
import { ago, count, dateTime } from "../../parts/format";
import type { IconName } from "../../parts/icon";
import { href } from "../../router";
import { limitsText, NO_LIMITS } from "./limit-fields";

const MARK: Record<string, { tone: Tone; icon: IconName }> = {
  active: { tone: "ok", icon: "check" },
  suspended: { tone: "warn", icon: "lock" },
  revoked: { tone: "bad", icon: "cross" },
  expired: { tone: "neutral", icon: "clock" },
};
export const GRACE_S = 3600;

interface KeyRowProps {
  item: KeyItem;
  /** The tenant whose keys are listed; keys of others show their tenant. null = the list covers all tenants. */
  ofTenant: string | null;
  /** In the last 24 hours; null while unknown. */
  numRequests: number | null;
  onEdit: () => void;
  onRotate: () => void;
  onStatus: (status: "active" | "suspended") => void;
  onRevoke: () => void;
}

export function KeyRow({ item, ofTenant, numRequests, onEdit, onRotate, onStatus, onRevoke }: KeyRowProps) {
  const status = item.is_expired && item.status !== "revoked" ? "expired" : item.status;
  return (
    <tr data-testid="key-row">
      <td class="key-cell">
        {item.name && (
          <span class="strong truncate" title={item.name}>
            {item.name}
          </span>
        )}
        <code class="muted">ls-{item.id}_…</code>
      </td>
      <td data-label="Status">
        <Chip {...(MARK[status] ?? {})}>{status}</Chip>
        {isRotating(item) && (
          <span class="muted small under nowrap" title={`The secret from before the last rotation works until ${dateTime(item.rotating_until ?? 0)}`}>
            old secret valid
          </span>
        )}
      </td>
      <td data-label="Role">
        {item.role}
        {item.tenant !== ofTenant && <span class="muted small under nowrap">{item.tenant === "*" ? "all tenants" : item.tenant}</span>}
      </td>
      <td class="scope-cell" data-label="Can use">
        <span class="truncate" title={item.adapters?.join(", ")}>
          {item.adapters?.join(", ") ?? <span class="muted">all adapters</span>}
        </span>
        <span class="muted small truncate" title={limitsText(item.limits)}>
          {limitsText(item.limits) === NO_LIMITS ? "no limits" : limitsText(item.limits)}
        </span>
      </td>
      <td class="right" data-label="Requests, 24 h">
        <a href={href(["access", "usage"], { key_id: item.id, by: ofTenant === null ? "tenant" : null })}>
          <span class="visually-hidden">Usage of {item.name || item.id}: </span>
          <Amount of={numRequests === null ? null : count(numRequests)} />
        </a>
      </td>
      <td class="num nowrap" data-label="Expires">
        {item.expires_at == null ? <span class="muted">never</span> : <span title={dateTime(item.expires_at)}>{until(item.expires_at)}</span>}
        <span class="muted small under" title={dateTime(item.created_at)}>
          created {ago(item.created_at)}
        </span>
      </td>
      <td class="row-actions">
        {item.status !== "revoked" && (
          <button type="button" class="button is-quiet" onClick={onEdit}>
            Edit
          </button>
        )}
        {item.status === "active" && (
          <button
            type="button"
            class="button is-quiet"
            title={`The old secret keeps working for ${GRACE_S / 60} minutes`}
            // Ignore the second click of a double click: another rotation would end the secret from before the first at once.
            onClick={(event) => event.detail < 2 && onRotate()}
          >
            Rotate
          </button>
        )}
        {(item.status === "active" || item.status === "suspended") && (
          <button type="button" class="button is-quiet" onClick={() => onStatus(item.status === "active" ? "suspended" : "active")}>
            {item.status === "active" ? "Suspend" : "Resume"}
          </button>
        )}
        {item.status !== "revoked" && (
          <button type="button" class="button is-quiet is-danger" onClick={onRevoke}>
            Revoke
          </button>
        )}
      </td>
    </tr>
  );
}

/** Whether the secret from before the last rotation still works; the next rotation ends it. */
export function isRotating({ rotating_until }: KeyItem): boolean {
  return rotating_until !== null && rotating_until > Date.now() / 1000;
}

/** "in 3 d", or "3 d ago" if it has passed. */
function until(unixS: number): string {
  const left = unixS - Date.now() / 1000;
  if (left <= 0) return ago(unixS);
  if (left < 3600) return `in ${Math.ceil(left / 60)} min`;
  return left < 172_800 ? `in ${Math.round(left / 3600)} h` : `in ${Math.round(left / 86_400)} d`;
}

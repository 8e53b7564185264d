import { useEffect } from "preact/hooks";

import { call } from "../../api/client";
import type { TenantItem } from "../../api/types";
import { Amount, Chip, type Tone } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { ago, bytes, count, dateTime, seconds } from "../../parts/format";
import { Icon, type IconName } from "../../parts/icon";
import { ListView } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { numTenantsChanged } from "../../state/changes";
import { usePaged } from "../../state/paged";
import { actFor, shownTenant } from "../../state/session";

const RESTORABLE_S = 86_400;
/** In addition to each refresh of the list above. */
const REFRESH_MS = 60_000;
const STATES: Record<string, { tone: Tone; icon: IconName }> = {
  draining: { tone: "warn", icon: "clock" },
  deleted: { tone: "bad", icon: "trash" },
  erased: { tone: "neutral", icon: "check" },
};

interface DeleteTenantDialogProps {
  tenant: TenantItem;
  onClose: () => void;
  onDone: () => void;
}

export function DeleteTenantDialog({ tenant, onClose, onDone }: DeleteTenantDialogProps) {
  return (
    <Dialog
      title={`Delete ${tenant.id}?`}
      confirm="Delete"
      danger
      typeToConfirm={tenant.id}
      progress="Deleting the tenant and waiting for its requests to end on every server…"
      onClose={onClose}
      onConfirm={async () => {
        const { data } = await call<TenantItem>("DELETE", tenantPath(tenant.id));
        numTenantsChanged.value += 1;
        const rest = data.status === "draining" ? " Some of its work is still shutting down." : "";
        toast(`Deleted ${tenant.id}.${rest}`, () => restore(tenant.id));
        if (shownTenant.value === tenant.id) actFor("");
        onDone();
      }}
    >
      <p>{holdings(tenant)} New requests are refused immediately, and running requests end at once.</p>
      <p>You can restore it for 24 hours. After that, its keys and adapters are erased; its usage is kept for billing.</p>
    </Dialog>
  );
}

/** Tenants that can be restored, and erased ones of which only the name is left. Renders nothing if there are none. */
export function DeletedTenants({ ofPage }: { ofPage: { at: { value: number }; refresh: () => void } }) {
  const list = usePaged<TenantItem>("/v1/tenants?deleted=true", 100, REFRESH_MS);
  const pageAt = ofPage.at.value;
  // A tenant that was just deleted moves from the list above to this one.
  useEffect(() => list.refresh(), [pageAt]);

  async function takeBack(tenant: TenantItem): Promise<void> {
    try {
      await restore(tenant.id);
      toast(`Restored ${tenant.id}, with its keys and adapters.`);
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    }
    ofPage.refresh();
    list.refresh();
  }

  if (list.error.value === null && !list.rows.value?.length) return null;
  return (
    <section class="deleted-tenants" aria-labelledby="deleted-tenants">
      <h2 id="deleted-tenants">Deleted</h2>
      <ListView of={list} skeleton={null} older="More deleted tenants">
        {(rows) => (
          <div class="panel scroll-x">
            <table class="table is-cards tenants-table">
              <caption class="visually-hidden">Deleted tenants</caption>
              <thead>
                <tr>
                  <th>Tenant</th>
                  <th>Status</th>
                  <th class="right">Adapters</th>
                  <th class="right">Bytes</th>
                  <th class="right">Keys</th>
                  <th>Deleted</th>
                  <th>Retention</th>
                  <th>
                    <span class="visually-hidden">Actions</span>
                  </th>
                </tr>
              </thead>
              <tbody>
                {rows.map((tenant) => (
                  <Row key={tenant.id} tenant={tenant} onRestore={() => void takeBack(tenant)} />
                ))}
              </tbody>
            </table>
          </div>
        )}
      </ListView>
    </section>
  );
}

function Row({ tenant, onRestore }: { tenant: TenantItem; onRestore: () => void }) {
  const { tone, icon } = STATES[tenant.status] ?? { tone: "neutral" as Tone, icon: "info" as IconName };
  const deletedAt = tenant.deleted_at ?? 0;
  const leftS = deletedAt + RESTORABLE_S - Date.now() / 1000;
  return (
    <tr data-testid="deleted-tenant-row">
      <td class="tenant-cell" title={tenant.description || tenant.id}>
        <span class="strong truncate">{tenant.id}</span>
        {tenant.description && <span class="muted small truncate">{tenant.description}</span>}
      </td>
      <td data-label="Status">
        <Chip tone={tone} icon={icon}>
          {tenant.status}
        </Chip>
      </td>
      <td class="right" data-label="Adapters">
        {tenant.num_adapters}
      </td>
      <td class="right" data-label="Bytes">
        <Amount of={bytes(tenant.adapter_bytes)} />
      </td>
      <td class="right" data-label="Keys">
        {tenant.num_keys}
      </td>
      <td data-label="Deleted" title={dateTime(deletedAt)}>
        {ago(deletedAt)}
      </td>
      <td class="muted is-span-2" data-label="Retention">
        {fate(tenant, leftS)}
      </td>
      <td class="row-actions">
        {leftS > 0 && !tenant.erased_at && (
          <button type="button" class="button is-quiet" onClick={onRestore}>
            <Icon name="undo" /> Restore
          </button>
        )}
      </td>
    </tr>
  );
}

/** leftS: seconds for which the tenant can still be restored. */
function fate(tenant: TenantItem, leftS: number): string {
  if (tenant.erased_at) return `Erased ${ago(tenant.erased_at)}; its usage is kept`;
  if (leftS <= 0) return "Being erased";
  const { value, unit } = seconds(leftS);
  return `Can be restored for ${value} ${unit}`;
}

function holdings(tenant: TenantItem): string {
  const size = bytes(tenant.adapter_bytes);
  const onDisk = tenant.adapter_bytes > 0 ? ` (${size.value} ${size.unit})` : "";
  return `It has ${plural(tenant.num_keys, "key")} and ${plural(tenant.num_adapters, "adapter")}${onDisk}.`;
}

function plural(number: number, word: string): string {
  const { value, unit } = count(number);
  return `${value}${unit} ${word}${number === 1 ? "" : "s"}`;
}

async function restore(tenant: string): Promise<void> {
  await call("POST", `${tenantPath(tenant)}/restore`);
  numTenantsChanged.value += 1;
}

function tenantPath(tenant: string): string {
  return `/v1/tenants/${encodeURIComponent(tenant)}`;
}

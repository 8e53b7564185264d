import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { TenantItem, UsageReport } from "../../api/types";
import { Amount, Chip } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { bytes, count } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { ListView, SkeletonRows } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { go, href } from "../../router";
import { usePaged } from "../../state/paged";
import { usePolled } from "../../state/polled";
import { actFor, BUILTIN_TENANTS } from "../../state/session";
import { DeletedTenants, DeleteTenantDialog } from "./deleted-tenants";
import { limitsText } from "./limit-fields";
import { TenantDialog } from "./tenant-dialog";

type Used = UsageReport["data"][number];

const DAY_S = 86_400;
const REFRESH_MS = 10_000;

export function Tenants() {
  const list = usePaged<TenantItem>("/v1/tenants", 100, REFRESH_MS);
  const editing = useSignal<TenantItem | "new" | null>(null);
  const suspending = useSignal<TenantItem | null>(null);
  const deleting = useSignal<TenantItem | null>(null);
  const usage = usePolled(
    "usage of tenants",
    async (signal) => {
      const query = new URLSearchParams({ from: String(Math.floor(Date.now() / 1000) - DAY_S), group_by: "tenant" });
      return (await call<UsageReport>("GET", `/v1/usage?${query}`, { signal })).data.data;
    },
    30_000,
  );

  async function setStatus(tenant: TenantItem, status: "active" | "suspended"): Promise<void> {
    await call("PATCH", `/v1/tenants/${encodeURIComponent(tenant.id)}`, { body: { status } });
    list.refresh();
  }

  async function resume(tenant: TenantItem): Promise<void> {
    try {
      await setStatus(tenant, "active");
      toast(`${tenant.id} is active again.`);
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    }
  }

  return (
    <>
      <div class="cluster access-actions">
        <a class="button" href={href(["access", "usage"], { by: "tenant" })}>
          <Icon name="overview" /> Usage of all tenants
        </a>
        <button type="button" class="button is-primary" onClick={() => (editing.value = "new")}>
          <Icon name="plus" /> New tenant
        </button>
      </div>
      <ListView of={list} skeleton={<SkeletonRows rows={4} />} older="More tenants">
        {(rows) => (
          <div class="panel scroll-x">
            <table class="table is-cards tenants-table">
              <caption class="visually-hidden">Tenants</caption>
              <thead>
                <tr>
                  <th>Tenant</th>
                  <th>Status</th>
                  <th class="right">Adapters</th>
                  <th class="right">Bytes</th>
                  <th class="right">Keys</th>
                  <th class="right">Requests, 24 h</th>
                  <th class="right">Output tokens</th>
                  <th class="right">Weight</th>
                  <th>Limits</th>
                  <th>
                    <span class="visually-hidden">Actions</span>
                  </th>
                </tr>
              </thead>
              <tbody>
                {rows.map((tenant) => (
                  <Row
                    key={tenant.id}
                    tenant={tenant}
                    used={usage.data.value?.find((row) => row.tenant === tenant.id)}
                    known={usage.data.value !== null}
                    onEdit={() => (editing.value = tenant)}
                    onSuspend={() => (suspending.value = tenant)}
                    onResume={() => void resume(tenant)}
                    onDelete={() => (deleting.value = tenant)}
                  />
                ))}
              </tbody>
            </table>
          </div>
        )}
      </ListView>
      <DeletedTenants ofPage={list} />
      {deleting.value && <DeleteTenantDialog tenant={deleting.value} onClose={() => (deleting.value = null)} onDone={list.refresh} />}
      {editing.value && <TenantDialog tenant={editing.value === "new" ? null : editing.value} onClose={() => (editing.value = null)} onDone={list.refresh} />}
      {suspending.value && (
        <Dialog
          title={`Suspend ${suspending.value.id}?`}
          confirm="Suspend"
          danger
          typeToConfirm={suspending.value.id}
          onClose={() => (suspending.value = null)}
          onConfirm={async () => {
            const tenant = suspending.value;
            if (!tenant) return;
            await setStatus(tenant, "suspended");
            toast(`Suspended ${tenant.id}.`, () => setStatus(tenant, "active"));
          }}
        >
          <p>New requests are refused immediately, and running requests end within 5 seconds. Nothing is deleted.</p>
        </Dialog>
      )}
    </>
  );
}

interface RowProps {
  tenant: TenantItem;
  used: Used | undefined;
  /** Whether the usage has been loaded. */
  known: boolean;
  onEdit: () => void;
  onSuspend: () => void;
  onResume: () => void;
  onDelete: () => void;
}

function Row({ tenant, used, known, onEdit, onSuspend, onResume, onDelete }: RowProps) {
  const active = tenant.status === "active";
  return (
    <tr data-testid="tenant-row">
      <td class="tenant-cell" title={tenant.description || tenant.id}>
        <span class="strong truncate">{tenant.id}</span>
        {tenant.description && <span class="muted small truncate">{tenant.description}</span>}
      </td>
      <td data-label="Status">
        <Chip tone={active ? "ok" : "bad"} icon={active ? "check" : "lock"}>
          {tenant.status}
        </Chip>
      </td>
      <td class="right" data-label="Adapters">
        <Rows tenant={tenant.id} of="Adapters" to={["adapters"]}>
          {tenant.num_adapters}
        </Rows>
      </td>
      <td class="right" data-label="Bytes">
        <Amount of={bytes(tenant.adapter_bytes)} />
      </td>
      <td class="right" data-label="Keys">
        <Rows tenant={tenant.id} of="Keys" to={["access", "keys"]}>
          {tenant.num_keys}
        </Rows>
      </td>
      <td class="right" data-label="Requests, 24 h">
        <Rows tenant={tenant.id} of="Usage" to={["access", "usage"]}>
          <Amount of={known ? count(used?.num_requests ?? 0) : null} />
        </Rows>
      </td>
      <td class="right" data-label="Output tokens">
        <Amount of={known ? count(used?.num_output_tokens ?? 0) : null} />
      </td>
      <td class="right" data-label="Weight">
        {tenant.weight}
      </td>
      <td class="limits-cell muted is-span-2" data-label="Limits" title={limitsText(tenant.limits)}>
        <span>{limitsText(tenant.limits)}</span>
      </td>
      <td class="row-actions">
        <button type="button" class="button is-quiet" onClick={onEdit}>
          Edit
        </button>
        {active ? (
          <button type="button" class="button is-quiet is-danger" onClick={onSuspend}>
            Suspend
          </button>
        ) : (
          <button type="button" class="button is-quiet" onClick={onResume}>
            Resume
          </button>
        )}
        {!BUILTIN_TENANTS.includes(tenant.id) && (
          <button type="button" class="button is-quiet is-danger is-icon" aria-label={`Delete ${tenant.id}`} title="Delete" onClick={onDelete}>
            <Icon name="trash" />
          </button>
        )}
      </td>
    </tr>
  );
}

/** A number that links to the tenant's rows behind it. Following it makes the console act for that tenant. */
function Rows({ tenant, of, to, children }: { tenant: string; of: string; to: string[]; children: preact.ComponentChildren }) {
  return (
    <button type="button" class="link" onClick={() => (actFor(tenant), go(href(to)))}>
      <span class="visually-hidden">
        {of} of {tenant}:{" "}
      </span>
      {children}
    </button>
  );
}

import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { TenantItem, UsageReport } from "../../api/types";
import { Amount, Chip, Field } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { bytes, count } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { Failure, SkeletonRows } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { go, href } from "../../router";
import { usePaged } from "../../state/paged";
import { usePolled } from "../../state/polled";
import { actFor } from "../../state/session";
import { LimitFields, type Limits, limitsText } from "./limit-fields";

const DAY_S = 86_400;
const REFRESH_MS = 10_000;

export function Tenants() {
  const list = usePaged<TenantItem>("/v1/tenants", 100, REFRESH_MS);
  const editing = useSignal<TenantItem | "new" | null>(null);
  const suspending = useSignal<TenantItem | null>(null);
  const usage = usePolled(
    "usage of tenants",
    async (signal) => {
      const query = new URLSearchParams({ from: String(Math.floor(Date.now() / 1000) - DAY_S), group_by: "tenant" });
      return (await call<UsageReport>("GET", `/v1/usage?${query}`, { signal })).data.data;
    },
    30_000,
  );
  const rows = list.rows.value;

  async function setStatus(tenant: TenantItem, status: "active" | "suspended"): Promise<void> {
    await call("PATCH", `/v1/tenants/${encodeURIComponent(tenant.id)}`, { body: { status } });
    list.refresh();
  }

  function showKeys(id: string): void {
    actFor(id);
    go(href(["access", "keys"]));
  }

  if (rows === null) return list.error.value ? <Failure error={list.error.value} retry={list.refresh} /> : <SkeletonRows rows={4} />;
  return (
    <>
      <div class="cluster access-actions">
        <button type="button" class="button is-primary" onClick={() => (editing.value = "new")}>
          <Icon name="plus" /> New tenant
        </button>
      </div>
      <div class="panel scroll-x">
        <table class="table is-cards">
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
            {rows.map((tenant) => {
              const used = usage.data.value?.find((row) => row.tenant === tenant.id);
              return (
                <tr key={tenant.id} data-testid="tenant-row">
                  <td class="strong" title={tenant.description}>
                    {tenant.id}
                  </td>
                  <td data-label="Status">
                    <Chip tone={tenant.status === "active" ? "ok" : "bad"} icon={tenant.status === "active" ? "check" : "lock"}>
                      {tenant.status}
                    </Chip>
                  </td>
                  <td class="right" data-label="Adapters">{tenant.num_adapters}</td>
                  <td class="right" data-label="Bytes">
                    <Amount of={bytes(tenant.adapter_bytes)} />
                  </td>
                  <td class="right" data-label="Keys">
                    <button type="button" class="link" onClick={() => showKeys(tenant.id)}>
                      <span class="visually-hidden">Keys of {tenant.id}: </span>
                      {tenant.num_keys}
                    </button>
                  </td>
                  <td class="right" data-label="Requests, 24 h">
                    <Amount of={count(used?.num_requests ?? 0)} />
                  </td>
                  <td class="right" data-label="Output tokens">
                    <Amount of={count(used?.num_output_tokens ?? 0)} />
                  </td>
                  <td class="right" data-label="Weight">{tenant.weight}</td>
                  <td class="limits-cell muted truncate is-span-2" data-label="Limits" title={limitsText(tenant.limits)}>
                    {limitsText(tenant.limits)}
                  </td>
                  <td class="row-actions">
                    <button type="button" class="button is-quiet" onClick={() => (editing.value = tenant)}>
                      Edit
                    </button>
                    {tenant.status === "active" ? (
                      <button type="button" class="button is-quiet is-danger" onClick={() => (suspending.value = tenant)}>
                        Suspend
                      </button>
                    ) : (
                      <button type="button" class="button is-quiet" onClick={() => void setStatus(tenant, "active")}>
                        Resume
                      </button>
                    )}
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
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
          <p>Its requests are refused from the next one on, and what runs ends within 5 seconds. Nothing is deleted.</p>
        </Dialog>
      )}
    </>
  );
}

function TenantDialog({ tenant, onClose, onDone }: { tenant: TenantItem | null; onClose: () => void; onDone: () => void }) {
  const id = useSignal(tenant?.id ?? "");
  const description = useSignal(tenant?.description ?? "");
  const weight = useSignal(tenant?.weight ?? 1);
  const limits = useSignal<Limits>(tenant?.limits ?? ({} as Limits));

  async function save(): Promise<void> {
    const body = { description: description.value, weight: weight.value, limits: limits.value };
    if (tenant) await call("PATCH", `/v1/tenants/${encodeURIComponent(tenant.id)}`, { headers: { "if-match": `"${tenant.rev}"` }, body });
    else await call("POST", "/v1/tenants", { body: { id: id.value, ...body } });
    toast(tenant ? `Changed ${tenant.id}.` : `Created ${id.value}.`);
    onDone();
  }

  return (
    <Dialog title={tenant ? `Edit ${tenant.id}` : "New tenant"} confirm={tenant ? "Save" : "Create"} onClose={onClose} onConfirm={save}>
      {!tenant && (
        <Field label="Name" hint="Lower-case letters, digits and hyphens. It cannot be changed.">
          <input class="input mono" required pattern="[a-z0-9][a-z0-9\-]{0,63}" value={id.value} onInput={(event) => (id.value = event.currentTarget.value)} />
        </Field>
      )}
      <Field label="Description">
        <input class="input" value={description.value} onInput={(event) => (description.value = event.currentTarget.value)} />
      </Field>
      <Field label="Weight" hint="Its share of the engine beside other tenants.">
        <input class="input num" type="number" min={0.01} step="any" value={weight.value} onInput={(event) => (weight.value = event.currentTarget.valueAsNumber)} />
      </Field>
      <LimitFields limits={limits} tenant />
    </Dialog>
  );
}

import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { TenantItem } from "../../api/types";
import { Field } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { toast } from "../../parts/toasts";
import { numTenantsChanged } from "../../state/changes";
import { LimitFields, type Limits } from "./limit-fields";

/** tenant: to change it; null = a new one. */
export function TenantDialog({ tenant, onClose, onDone }: { tenant: TenantItem | null; onClose: () => void; onDone: () => void }) {
  const id = useSignal(tenant?.id ?? "");
  const description = useSignal(tenant?.description ?? "");
  // As it was typed: read as a number while it is typed, “.5” would begin with nothing.
  const weight = useSignal(String(tenant?.weight ?? 1));
  const limits = useSignal<Limits>(tenant?.limits ?? ({} as Limits));

  async function save(): Promise<void> {
    const body = { description: description.value, weight: Number(weight.value), limits: limits.value };
    if (tenant) await call("PATCH", `/v1/tenants/${encodeURIComponent(tenant.id)}`, { headers: { "if-match": `"${tenant.rev}"` }, body });
    else {
      await call("POST", "/v1/tenants", { body: { id: id.value, ...body } });
      numTenantsChanged.value += 1;
    }
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
        <input class="input num" type="number" required min={0.01} step="any" value={weight.value} onInput={(event) => (weight.value = event.currentTarget.value)} />
      </Field>
      <LimitFields limits={limits} tenant />
    </Dialog>
  );
}

import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { TenantItem } from "../../api/types";
import { Field } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { toast } from "../../parts/toasts";
import { numTenantsChanged } from "../../state/changes";
import { LimitFields, type Limits } from "./limit-fields";

/** tenant: the one to edit; null = create one. */
export function TenantDialog({ tenant, onClose, onDone }: { tenant: TenantItem | null; onClose: () => void; onDone: () => void }) {
  const id = useSignal(tenant?.id ?? "");
  const description = useSignal(tenant?.description ?? "");
  // Kept as typed: if parsed on every keystroke, the “.” of “.5” would be lost.
  const weight = useSignal(String(tenant?.weight ?? 1));
  const limits = useSignal<Limits>(tenant?.limits ?? ({} as Limits));

  async function save(): Promise<void> {
    const body = { description: description.value, weight: Number(weight.value), limits: limits.value };
    if (tenant) await call("PATCH", `/v1/tenants/${encodeURIComponent(tenant.id)}`, { headers: { "if-match": `"${tenant.rev}"` }, body });
    else {
      await call("POST", "/v1/tenants", { body: { id: id.value, ...body } });
      numTenantsChanged.value += 1;
    }
    toast(tenant ? `Updated ${tenant.id}.` : `Created ${id.value}.`);
    onDone();
  }

  return (
    <Dialog title={tenant ? `Edit ${tenant.id}` : "New tenant"} confirm={tenant ? "Save" : "Create"} onClose={onClose} onConfirm={save}>
      {!tenant && (
        <Field label="Name" hint="Lowercase letters, digits and hyphens. It cannot be changed later.">
          <input class="input mono" required pattern="[a-z0-9][a-z0-9\-]{0,63}" value={id.value} onInput={(event) => (id.value = event.currentTarget.value)} />
        </Field>
      )}
      <Field label="Description">
        <input class="input" value={description.value} onInput={(event) => (description.value = event.currentTarget.value)} />
      </Field>
      <Field label="Weight" hint="Its share of the engine when several tenants are waiting.">
        <input class="input num" type="number" required min={0.01} step="any" value={weight.value} onInput={(event) => (weight.value = event.currentTarget.value)} />
      </Field>
      <LimitFields limits={limits} tenant />
    </Dialog>
  );
}

import { useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";

import { ApiError, call } from "../../api/client";
import type { CreatedKey, KeyItem } from "../../api/types";
import { Field } from "../../parts/basics";
import { randomId } from "../../parts/clipboard";
import { Dialog } from "../../parts/dialog";
import { dateTime } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { toast } from "../../parts/toasts";
import { mayActForAll, session, shownTenant } from "../../state/session";
import { LimitFields, type Limits } from "./limit-fields";

const ROLES = [
  { role: "infer", hint: "can only send requests" },
  { role: "viewer", hint: "can view adapters, usage, requests and live data" },
  { role: "operator", hint: "can also send requests, and upload and manage adapters" },
  { role: "admin", hint: "can also manage keys" },
] as const;
const DAY_S = 86_400;

interface KeyDialogProps {
  /** The key to edit; null = create one. */
  keyItem: KeyItem | null;
  onClose: () => void;
  onMade: (key: CreatedKey) => Promise<void>;
  onChanged: () => void;
}

export function KeyDialog({ keyItem, onClose, onMade, onChanged }: KeyDialogProps) {
  const name = useSignal(keyItem?.name ?? "");
  const isFirst = keyItem === null && session.value?.open === true;
  const role = useSignal<KeyItem["role"]>(keyItem?.role ?? (isFirst ? "admin" : "infer"));
  const everyTenant = useSignal(isFirst || keyItem?.tenant === "*");
  const adapters = useSignal(keyItem?.adapters?.join(", ") ?? "");
  const days = useSignal("");
  const endless = useSignal(false);
  const limits = useSignal<Limits>(keyItem?.limits ?? ({} as Limits));

  async function save(): Promise<void> {
    const names = adapters.value.split(",").map((adapter) => adapter.trim());
    const allowed = names.filter(Boolean);
    const endsInS = days.value ? Math.round(Number(days.value) * DAY_S) : null;
    const body = { name: name.value, role: role.value, adapters: allowed.length > 0 ? allowed : null, limits: limits.value };
    if (keyItem) {
      const expiresAt = endsInS === null ? undefined : Math.floor(Date.now() / 1000) + endsInS;
      const ends = { expires_at: endless.value ? null : expiresAt };
      await call("PATCH", `/v1/keys/${keyItem.id}`, { headers: { "if-match": `"${keyItem.rev}"` }, body: { ...body, ...ends } });
      toast(`Updated ${name.value || keyItem.id}.`);
      onChanged();
      return;
    }
    const options = { ...(everyTenant.value ? { tenant: "*" } : {}), ...(endsInS === null ? {} : { expires_in_s: endsInS }) };
    await onMade(await create({ ...body, ...options }));
  }

  const asked = useRef({ text: "", id: "" });

  /** Repeating the same creation after its response was lost creates no second key. */
  async function create(body: object): Promise<CreatedKey> {
    const text = JSON.stringify(body);
    if (asked.current.text !== text) asked.current = { text, id: randomId() };
    try {
      const { data } = await call<CreatedKey>("POST", "/v1/keys", { body, headers: { "idempotency-key": asked.current.id } });
      if (data.secret !== null) return data;
      // The secret was in the lost response, so nobody has it: rotate the key to get a new one.
      const headers = { "if-match": `"${data.rev}"` };
      return (await call<CreatedKey>("POST", `/v1/keys/${data.id}/rotate`, { headers, body: { grace_s: 0 } })).data;
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 0) throw error;
      throw new ApiError(0, error.code, `${error.message} The key may have been created anyway. Choose Create again without changes to get that key instead of a second one.`);
    }
  }

  const title = keyItem ? `Edit ${keyItem.name || keyItem.id}` : `New key for ${everyTenant.value ? "all tenants" : shownTenant.value}`;
  return (
    <Dialog title={title} confirm={keyItem ? "Save" : "Create"} onClose={onClose} onConfirm={save}>
      <Field label="Name" hint="A note for people, such as where the key is used.">
        <input class="input" value={name.value} onInput={(event) => (name.value = event.currentTarget.value)} />
      </Field>
      <fieldset class="roles">
        <legend class="field-label">Role</legend>
        {ROLES.map((option) => (
          <label key={option.role} class="role">
            <input type="radio" name="role" value={option.role} checked={role.value === option.role} onChange={() => (role.value = option.role)} />
            <span>
              {option.role} <span class="muted small">{option.hint}</span>
            </span>
          </label>
        ))}
        {!keyItem && mayActForAll.value && (
          <label class="role">
            <input type="checkbox" checked={everyTenant.value} onChange={(event) => (everyTenant.value = event.currentTarget.checked)} />
            For all tenants
          </label>
        )}
      </fieldset>
      {isFirst && !(role.value === "admin" && everyTenant.value) && (
        <p class="problem" role="alert">
          <Icon name="warn" />
          <span>
            Once the first key exists, every request needs a key, and this one cannot create keys for all tenants. Only <code>loraserve keys create</code> on
            the server's machine could do that.
          </span>
        </p>
      )}
      <Field label="Only these adapters" hint="Adapter names separated by commas. Leave empty for all.">
        <input class="input mono" value={adapters.value} onInput={(event) => (adapters.value = event.currentTarget.value)} />
      </Field>
      <Field label="Expires in (days)" hint={keyItem ? "Counted from now. Leave empty to keep the current expiry." : "Leave empty for a key that never expires."}>
        <input
          class="input num"
          type="number"
          min={0.01}
          step="any"
          value={endless.value ? "" : days.value}
          disabled={endless.value}
          onInput={(event) => (days.value = event.currentTarget.value)}
        />
      </Field>
      {keyItem !== null && keyItem.expires_at !== null && (
        <label class="role">
          <input type="checkbox" checked={endless.value} onChange={(event) => (endless.value = event.currentTarget.checked)} />
          <span>
            Never expires <span class="muted small">{keyItem.is_expired ? "expired" : "now expires"} {dateTime(keyItem.expires_at)}</span>
          </span>
        </label>
      )}
      <details open={keyItem !== null}>
        <summary>Limits</summary>
        <LimitFields limits={limits} />
      </details>
    </Dialog>
  );
}

import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { KeyItem } from "../../api/types";
import { Chip, CopyButton, Field, type Tone } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { ago, dateTime } from "../../parts/format";
import { Icon, type IconName } from "../../parts/icon";
import { Empty, Failure, SkeletonRows } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { usePaged } from "../../state/paged";
import { mayActForAll, session, shownTenant } from "../../state/session";
import { LimitFields, type Limits, limitsText } from "./limit-fields";

type CreatedKey = KeyItem & { secret: string | null };

const MARK: Record<string, { tone: Tone; icon: IconName }> = {
  active: { tone: "ok", icon: "check" },
  suspended: { tone: "warn", icon: "lock" },
  revoked: { tone: "bad", icon: "cross" },
  expired: { tone: "neutral", icon: "clock" },
};
const ROLES = [
  { role: "infer", hint: "may only send requests" },
  { role: "viewer", hint: "sees adapters, usage and live data" },
  { role: "operator", hint: "also uploads and moves adapters, and infers" },
  { role: "admin", hint: "also makes keys" },
];
const DAY_S = 86_400;
const GRACE_S = 3600;

export function Keys() {
  const list = usePaged<KeyItem>("/v1/keys", 100, 10_000);
  const creating = useSignal(false);
  const made = useSignal<CreatedKey | null>(null);
  const revoking = useSignal<KeyItem | null>(null);
  const rows = list.rows.value;

  async function act(text: string, work: () => Promise<unknown>, undo?: () => Promise<unknown>): Promise<void> {
    try {
      await work();
      toast(text, undo && (async () => (await undo(), list.refresh())));
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    }
    list.refresh();
  }

  const setStatus = (key: KeyItem, status: string) => call("PATCH", `/v1/keys/${key.id}`, { body: { status } });

  if (rows === null) return list.error.value ? <Failure error={list.error.value} retry={list.refresh} /> : <SkeletonRows rows={4} />;
  return (
    <>
      <div class="cluster access-actions">
        <button type="button" class="button is-primary" onClick={() => (creating.value = true)}>
          <Icon name="plus" /> New key
        </button>
      </div>
      {made.value?.secret && <Secret created={made.value} onClose={() => (made.value = null)} />}
      {rows.length === 0 ? (
        <Empty icon="key" title="No keys yet" command="loraserve keys create --role infer --tenant default">
          {session.value?.open && "The first key closes the server: from then on every request needs one. Make an admin key first."}
        </Empty>
      ) : (
        <div class="panel scroll-x">
          <table class="table is-cards">
            <caption class="visually-hidden">Keys</caption>
            <thead>
              <tr>
                <th>Key</th>
                <th>Name</th>
                <th>Status</th>
                <th>Role</th>
                <th>Tenant</th>
                <th>Adapters</th>
                <th>Limits</th>
                <th>Made</th>
                <th>Ends</th>
                <th>
                  <span class="visually-hidden">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {rows.map((key) => (
                <tr key={key.id} data-testid="key-row">
                  <td>
                    <code>ls-{key.id}_…</code>
                  </td>
                  <td data-label="Name">{key.name}</td>
                  <td data-label="Status">
                    <Chip {...(MARK[key.status] ?? {})}>{key.status}</Chip>
                  </td>
                  <td data-label="Role">{key.role}</td>
                  <td data-label="Tenant">{key.tenant === "*" ? <span class="muted">all</span> : key.tenant}</td>
                  <td class="limits-cell truncate" data-label="Adapters" title={key.adapters?.join(", ")}>
                    {key.adapters?.join(", ") ?? <span class="muted">all</span>}
                  </td>
                  <td class="limits-cell muted truncate" data-label="Limits" title={limitsText(key.limits)}>
                    {limitsText(key.limits)}
                  </td>
                  <td class="num" data-label="Made" title={dateTime(key.created_at)}>
                    {ago(key.created_at)}
                  </td>
                  <td class="num" data-label="Ends">{key.expires_at == null ? <span class="muted">never</span> : dateTime(key.expires_at)}</td>
                  <td class="row-actions">
                    {key.status === "active" && (
                      <>
                        <button
                          type="button"
                          class="button is-quiet"
                          title={`The old secret works for another ${GRACE_S / 60} minutes`}
                          onClick={() =>
                            act("Rotated: the old secret works for another hour.", async () => {
                              made.value = (await call<CreatedKey>("POST", `/v1/keys/${key.id}/rotate`, { body: { grace_s: GRACE_S } })).data;
                            })
                          }
                        >
                          Rotate
                        </button>
                        <button type="button" class="button is-quiet" onClick={() => act("Suspended.", () => setStatus(key, "suspended"), () => setStatus(key, "active"))}>
                          Suspend
                        </button>
                      </>
                    )}
                    {key.status === "suspended" && (
                      <button type="button" class="button is-quiet" onClick={() => act("Active again.", () => setStatus(key, "active"))}>
                        Resume
                      </button>
                    )}
                    {key.status !== "revoked" && (
                      <button type="button" class="button is-quiet is-danger" onClick={() => (revoking.value = key)}>
                        Revoke
                      </button>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {creating.value && (
        <NewKey
          onClose={() => (creating.value = false)}
          onMade={(created) => {
            made.value = created;
            list.refresh();
          }}
        />
      )}
      {revoking.value && (
        <Dialog
          title={`Revoke ${revoking.value.name || revoking.value.id}?`}
          confirm="Revoke"
          danger
          typeToConfirm={revoking.value.name || revoking.value.id}
          onClose={() => (revoking.value = null)}
          onConfirm={async () => {
            await call("DELETE", `/v1/keys/${revoking.value?.id}`);
            toast("Revoked.");
            list.refresh();
          }}
        >
          <p>It never works again, on any server, from the next request on. Its running streams end within 5 seconds.</p>
        </Dialog>
      )}
    </>
  );
}

/** The one time that a secret is shown. It lives in this page's memory only. */
function Secret({ created, onClose }: { created: CreatedKey; onClose: () => void }) {
  return (
    <div class="panel secret" role="status" data-testid="secret">
      <Icon name="key" />
      <div>
        <p class="strong">Copy this key now: nobody can show it again.</p>
        <div class="command">
          <code tabIndex={0}>{created.secret}</code>
          <CopyButton text={created.secret ?? ""} label="Copy the key" />
        </div>
      </div>
      <button type="button" class="button" onClick={onClose}>
        Done
      </button>
    </div>
  );
}

function NewKey({ onClose, onMade }: { onClose: () => void; onMade: (key: CreatedKey) => void }) {
  const name = useSignal("");
  const role = useSignal("infer");
  const everyTenant = useSignal(false);
  const adapters = useSignal("");
  const days = useSignal("");
  const limits = useSignal<Limits>({} as Limits);

  async function create(): Promise<void> {
    const names = adapters.value.split(",").map((adapter) => adapter.trim());
    const allowed = names.filter(Boolean);
    const body = {
      name: name.value,
      role: role.value,
      ...(everyTenant.value ? { tenant: "*" } : {}),
      adapters: allowed.length > 0 ? allowed : null,
      limits: limits.value,
      ...(days.value ? { expires_in_s: Math.round(Number(days.value) * DAY_S) } : {}),
    };
    onMade((await call<CreatedKey>("POST", "/v1/keys", { body, headers: { "idempotency-key": crypto.randomUUID() } })).data);
  }

  return (
    <Dialog title={`New key for ${everyTenant.value ? "all tenants" : shownTenant.value}`} confirm="Create" onClose={onClose} onConfirm={create}>
      <Field label="Name" hint="For people: where the key is used.">
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
        {mayActForAll.value && (
          <label class="role">
            <input type="checkbox" checked={everyTenant.value} onChange={(event) => (everyTenant.value = event.currentTarget.checked)} />
            For all tenants
          </label>
        )}
      </fieldset>
      <Field label="Only these adapters" hint="Names separated by commas; empty = all.">
        <input class="input mono" value={adapters.value} onInput={(event) => (adapters.value = event.currentTarget.value)} />
      </Field>
      <Field label="Ends after days" hint="Empty = never.">
        <input class="input num" type="number" min={0.01} step="any" value={days.value} onInput={(event) => (days.value = event.currentTarget.value)} />
      </Field>
      <details>
        <summary>Limits</summary>
        <LimitFields limits={limits} />
      </details>
    </Dialog>
  );
}

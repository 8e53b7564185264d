import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { CreatedKey, KeyItem, UsageReport } from "../../api/types";
import { cli } from "../../parts/commands";
import { Dialog } from "../../parts/dialog";
import { dateTime } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { Empty, ListView, SkeletonRows } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { place, setQuery } from "../../router";
import { madeKey, tryGoOnAs } from "../../state/made-key";
import { usePaged } from "../../state/paged";
import { usePolled } from "../../state/polled";
import { may, mayActForAll, session, shownTenant } from "../../state/session";
import { KeyDialog } from "./key-dialog";
import { GRACE_S, isRotating, KeyRow } from "./key-row";

const ROTATED = "Key rotated. The old secret works for another hour.";
const HEADS = ["Key", "Status", "Role", "Can use", "Requests, 24 h", "Expires"];

export function Keys() {
  const ofAll = mayActForAll.value && place.value.query.get("of") === "all";
  const list = usePaged<KeyItem>(mayActForAll.value && !ofAll ? `/v1/keys?tenant=${encodeURIComponent(shownTenant.value)}` : "/v1/keys", 100, 10_000);
  const editing = useSignal<KeyItem | "new" | null>(null);
  const revoking = useSignal<KeyItem | null>(null);
  const rotatingAgain = useSignal<KeyItem | null>(null);
  const usage = usePolled(
    `usage of keys ${ofAll}`,
    async (signal) => (await call<UsageReport>("GET", `/v1/usage?group_by=${ofAll ? "tenant,key" : "key"}`, { signal })).data.data,
    30_000,
  );

  async function act(text: string, work: () => Promise<unknown>, undo?: () => Promise<unknown>): Promise<void> {
    try {
      await work();
      toast(text, undo);
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    }
    list.refresh();
  }

  async function show(created: CreatedKey): Promise<void> {
    madeKey.value = created;
    if (session.value?.open && (await tryGoOnAs(created))) toast("The server now requires a key. This page uses the new one.");
    if (may("admin")) list.refresh();
  }

  async function rotate(key: KeyItem): Promise<void> {
    // Refused if someone rotated the key since it was read: a second rotation would end the secret from before theirs at once.
    const headers = { "if-match": `"${key.rev}"` };
    madeKey.value = (await call<CreatedKey>("POST", `/v1/keys/${key.id}/rotate`, { headers, body: { grace_s: GRACE_S } })).data;
  }

  function setStatus(key: KeyItem, status: "active" | "suspended"): Promise<void> {
    const change = (next: string) => call("PATCH", `/v1/keys/${key.id}`, { body: { status: next } });
    if (status === "active") return act("Key resumed.", () => change("active"));
    return act("Key suspended.", () => change("suspended"), () => change("active"));
  }

  function requestsOf(key: KeyItem): number | null {
    if (usage.data.value === null) return null;
    const rows = usage.data.value.filter((row) => row.key_id === key.id);
    return rows.reduce((sum, row) => sum + row.num_requests, 0);
  }

  return (
    <>
      <div class="cluster access-actions">
        {mayActForAll.value && (
          <div class="segmented" role="group" aria-label="Keys shown">
            <button type="button" aria-pressed={!ofAll} onClick={() => setQuery({ of: null })}>
              Only {shownTenant.value}
            </button>
            <button type="button" aria-pressed={ofAll} onClick={() => setQuery({ of: "all" })}>
              All keys
            </button>
          </div>
        )}
        <button type="button" class="button is-primary" onClick={() => (editing.value = "new")}>
          <Icon name="plus" /> New key
        </button>
      </div>
      <ListView of={list} skeleton={<SkeletonRows rows={4} />} older="More keys">
        {(rows) =>
          rows.length === 0 ? (
            <Empty icon="key" title={mayActForAll.value && !ofAll ? `No keys for ${shownTenant.value} yet` : "No keys yet"} command={cli(`keys create --role ${session.value?.open ? "admin --for-tenant '*'" : "infer"}`)}>
              {session.value?.open && "Once the first key exists, every request needs a key. Create an admin key for all tenants first."}
            </Empty>
          ) : (
            <div class="panel scroll-x">
              <table class="table is-cards keys-table">
                <caption class="visually-hidden">Keys</caption>
                <thead>
                  <tr>
                    {HEADS.map((head) => (
                      <th key={head} class={head.startsWith("Requests") ? "right" : ""}>
                        {head}
                      </th>
                    ))}
                    <th>
                      <span class="visually-hidden">Actions</span>
                    </th>
                  </tr>
                </thead>
                <tbody>
                  {rows.map((key) => (
                    <KeyRow
                      key={key.id}
                      item={key}
                      ofTenant={ofAll ? null : shownTenant.value}
                      numRequests={requestsOf(key)}
                      onEdit={() => (editing.value = key)}
                      onRotate={() => (isRotating(key) ? (rotatingAgain.value = key) : void act(ROTATED, () => rotate(key)))}
                      onStatus={(status) => void setStatus(key, status)}
                      onRevoke={() => (revoking.value = key)}
                    />
                  ))}
                </tbody>
              </table>
            </div>
          )
        }
      </ListView>
      {editing.value && (
        <KeyDialog
          keyItem={editing.value === "new" ? null : editing.value}
          onClose={() => (editing.value = null)}
          onChanged={list.refresh}
          onMade={show}
        />
      )}
      {rotatingAgain.value && (
        <Dialog
          title={`Rotate ${rotatingAgain.value.name || rotatingAgain.value.id} again?`}
          confirm="Rotate"
          danger
          onClose={() => (rotatingAgain.value = null)}
          onConfirm={async () => {
            if (rotatingAgain.value) await rotate(rotatingAgain.value);
            toast(ROTATED);
            list.refresh();
          }}
        >
          <p>
            The secret from before the last rotation works until {dateTime(rotatingAgain.value.rotating_until ?? 0)}. Rotating again ends it at once; the secret
            from the last rotation works for another hour.
          </p>
        </Dialog>
      )}
      {revoking.value && (
        <Dialog
          title={`Revoke ${revoking.value.name || revoking.value.id}?`}
          confirm="Revoke"
          danger
          typeToConfirm={revoking.value.name.trim() || revoking.value.id}
          onClose={() => (revoking.value = null)}
          onConfirm={async () => {
            await call("DELETE", `/v1/keys/${revoking.value?.id}`);
            toast("Key revoked.");
            list.refresh();
          }}
        >
          <p>Every server refuses this key from the next request on. Its running streams end within 5 seconds. This cannot be undone.</p>
        </Dialog>
      )}
    </>
  );
}

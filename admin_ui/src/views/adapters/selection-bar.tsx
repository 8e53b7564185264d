import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { AdapterItem } from "../../api/types";
import { Dialog } from "../../parts/dialog";
import { toast } from "../../parts/toasts";
import { otherTenant, tenantHeaders } from "../../state/session";

type Verb = "disable" | "enable" | "pin" | "delete";

interface Outcome {
  done: AdapterItem[];
  failed: { adapter: AdapterItem; message: string }[];
}

const PIN_S = 3600;
const DRAIN_S = 30;
const MAX_LISTED = 20;
const PAST: Record<Verb, string> = { disable: "Disabled", enable: "Enabled", pin: "Pinned", delete: "Deleted" };

/** Actions on several adapters at once. Each adapter is its own request, and each failure is reported. */
export function SelectionBar({ adapters, onDone }: { adapters: AdapterItem[]; onDone: () => void }) {
  const deleting = useSignal(false);
  const busy = useSignal(false);

  async function run(verb: Verb): Promise<void> {
    busy.value = true;
    const { done, failed } = await apply(verb, adapters);
    busy.value = false;
    const names = done.length === 1 ? done[0]?.name : `${done.length} adapters`;
    if (done.length > 0) toast(`${PAST[verb]} ${names}${verb === "pin" ? " for an hour" : ""}.`, undo(verb, done));
    for (const { adapter, message } of failed) toast(`${adapter.name}: ${message}`);
    onDone();
  }

  const only = adapters.length === 1 ? adapters[0] : undefined;
  return (
    <div class="selection-bar" role="region" aria-label="Selected adapters">
      <span class="num">
        {adapters.length} <span class="muted">selected</span>
      </span>
      <button type="button" class="button" disabled={busy.value} onClick={() => run("pin")}>
        Pin for an hour
      </button>
      <button type="button" class="button" disabled={busy.value} onClick={() => run("disable")}>
        Disable
      </button>
      <button type="button" class="button" disabled={busy.value} onClick={() => run("enable")}>
        Enable
      </button>
      <button type="button" class="button is-danger" disabled={busy.value} onClick={() => (deleting.value = true)}>
        Delete
      </button>
      <button type="button" class="button is-quiet" onClick={onDone}>
        Clear
      </button>
      {deleting.value && (
        <Dialog
          title={only ? `Delete ${only.name}?` : `Delete ${adapters.length} adapters?`}
          confirm="Delete"
          danger
          typeToConfirm={only ? only.name : `delete ${adapters.length}`}
          onClose={() => (deleting.value = false)}
          onConfirm={() => run("delete")}
        >
          {!only && <p class="selected-names">{listed(adapters)}</p>}
          <p>New requests for {only ? "it" : "them"} are refused immediately; running requests get {DRAIN_S} s to finish. You can restore {only ? "it" : "them"} for 24 hours.</p>
        </Dialog>
      )}
    </div>
  );
}

/** The selection may have been made with another search, so not all of it is in sight. */
function listed(adapters: AdapterItem[]): string {
  const names = adapters.map(({ name, tenant }) => (otherTenant(tenant) ? `${tenant}/${name}` : name));
  const more = names.length - MAX_LISTED;
  return names.slice(0, MAX_LISTED).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

async function apply(verb: Verb, adapters: AdapterItem[]): Promise<Outcome> {
  const outcome: Outcome = { done: [], failed: [] };
  // In parallel, because a deletion waits for running requests.
  await Promise.all(
    adapters.map(async (adapter) => {
      try {
        await one(verb, adapter);
        outcome.done.push(adapter);
      } catch (error) {
        outcome.failed.push({ adapter, message: error instanceof Error ? error.message : String(error) });
      }
    }),
  );
  return outcome;
}

function one(verb: Verb, { name, tenant }: AdapterItem): Promise<unknown> {
  const path = `/v1/adapters/${encodeURIComponent(name)}`;
  const headers = tenantHeaders(tenant);
  if (verb === "delete") return call("DELETE", `${path}?drain_s=${DRAIN_S}`, { headers });
  if (verb === "pin") return call("PUT", `${path}/residency`, { headers, body: { tier: "device", ttl_s: PIN_S } });
  return call("PATCH", path, { headers, body: { enabled: verb === "enable" } });
}

function undo(verb: Verb, done: AdapterItem[]): () => Promise<unknown> {
  return async () => {
    // Undo all of them, even if one is gone by now.
    const ends = await Promise.allSettled(done.map((adapter) => undoOne(verb, adapter)));
    const refused = ends.find((end) => end.status === "rejected");
    if (refused) throw refused.reason;
  };
}

function undoOne(verb: Verb, { name, tenant, enabled, pin }: AdapterItem): Promise<unknown> {
  const path = `/v1/adapters/${encodeURIComponent(name)}`;
  const headers = tenantHeaders(tenant);
  if (verb === "delete") return call("POST", `${path}/restore`, { headers });
  const leftS = pin === null ? 0 : pin.until && Math.round(pin.until - Date.now() / 1000);
  if (verb === "pin" && pin !== null && (leftS === null || leftS > 0)) return call("PUT", `${path}/residency`, { headers, body: { tier: pin.tier, ttl_s: leftS } });
  if (verb === "pin") return call("DELETE", `${path}/residency`, { headers });
  return call("PATCH", path, { headers, body: { enabled } });
}

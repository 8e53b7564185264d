import { useSignal } from "@preact/signals";

import type { AdapterDetail, AliasItem } from "../../api/types";
import { toast } from "../../parts/toasts";
import { mayChange } from "../../state/session";
import { moveAlias, restoreAlias } from "./adapter-api";
import { MoveAlias } from "./move-alias";

/** Shows how a running canary splits users between versions, and the two ways to end it. */
export function CanaryBar({ adapter, alias, onChange }: { adapter: AdapterDetail; alias: AliasItem; onChange: () => void }) {
  const changing = useSignal(false);
  const busy = useSignal(false);
  const canary = alias.canary;
  if (!canary) return null;
  const share = canary.weight_bp / 100;
  const version = adapter.versions.find((known) => known.n === canary.version);

  async function end(keep: number): Promise<void> {
    const undo = restoreAlias(adapter, alias.alias);
    busy.value = true;
    try {
      await moveAlias(adapter, alias.alias, keep);
      toast(`${alias.alias} now points to v${keep} for all users.`, undo);
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    } finally {
      busy.value = false;
    }
    onChange();
  }

  return (
    <section class="canary panel" aria-label={`Canary for ${alias.alias}`} data-testid={`canary-${alias.alias}`}>
      <div class="canary-split">
        <p>
          <span class="strong">{alias.alias}</span> <span class="muted">is</span> v{alias.version} <span class="muted">for {100 - share}% of users and</span> v
          {canary.version} <span class="muted">for {share}%</span>
        </p>
        <div class="gauge" aria-hidden="true">
          <span style={{ width: `${100 - share}%` }} />
          <span style={{ width: `${share}%` }} />
        </div>
      </div>
      {mayChange(adapter.tenant) && (
        <div class="cluster">
          {version && (
            <button type="button" class="button" onClick={() => (changing.value = true)}>
              Change share
            </button>
          )}
          <button type="button" class="button" disabled={busy.value} onClick={() => void end(canary.version)}>
            Use v{canary.version} for everyone
          </button>
          <button type="button" class="button" disabled={busy.value} onClick={() => void end(alias.version)}>
            End canary
          </button>
        </div>
      )}
      {changing.value && version && (
        <MoveAlias adapter={adapter} version={version} alias={alias.alias} onClose={() => (changing.value = false)} onChange={onChange} />
      )}
    </section>
  );
}

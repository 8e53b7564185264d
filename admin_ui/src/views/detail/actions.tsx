import type { Signal } from "@preact/signals";
import { useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";

import { call } from "../../api/client";
import type { AdapterDetail } from "../../api/types";
import { Field } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { Icon } from "../../parts/icon";
import { Menu } from "../../parts/menu";
import { toast } from "../../parts/toasts";
import { href } from "../../router";
import { otherTenant, tenantHeaders } from "../../state/session";
import { adapterPath, restoreAlias, rollBack } from "./adapter-api";

const PIN_S = 3600;
const DRAIN_S = 30;

interface ActionsProps {
  adapter: AdapterDetail;
  editing: Signal<boolean>;
  onChange: () => void;
  onGone: () => void;
}

/** Actions on the adapter as a whole. */
export function Actions({ adapter, editing, onChange, onGone }: ActionsProps) {
  const deleting = useSignal(false);
  const rolling = useSignal(false);
  const live = adapter.aliases.find((alias) => alias.alias === "live");
  const headers = tenantHeaders(adapter.tenant);
  const path = adapterPath(adapter.name);

  async function change(text: string, act: () => Promise<unknown>, undo?: () => Promise<unknown>): Promise<void> {
    try {
      await act();
      toast(text, undo);
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    }
    onChange();
  }

  /** ttl_s: null = until unpinned. */
  function pin(text: string, ttl_s: number | null): Promise<void> {
    const residency = `${path}/residency`;
    return change(
      text,
      () => call("PUT", residency, { headers, body: { tier: "device", ttl_s } }),
      () => call("DELETE", residency, { headers }),
    );
  }

  const answersLive = adapter.versions.find((version) => version.n === live?.version);
  const mode = answersLive?.classifier?.score_template ? "rerank" : "classify";
  const tried = answersLive?.classifier ? { columns: adapter.name, mode } : { columns: `,${adapter.name}` };

  function enable(enabled: boolean): Promise<unknown> {
    return call("PATCH", path, { headers, body: { enabled } });
  }

  if (adapter.status === "deleted") {
    return (
      <button
        type="button"
        class="button is-primary"
        onClick={() => change(`Restored ${adapter.name}.`, () => call("POST", `${path}/restore`, { headers }))}
      >
        <Icon name="undo" /> Restore
      </button>
    );
  }
  return (
    <div class="cluster detail-actions">
      {live?.previous != null && (
        <button type="button" class="button" data-testid="rollback" onClick={() => (rolling.value = true)}>
          <Icon name="undo" /> Roll back to v{live.previous}
        </button>
      )}
      <a class="button" href={href(["playground"], { ...tried, tenant: otherTenant(adapter.tenant) })}>
        <Icon name="play" /> Try it
      </a>
      <a class="button" href={href(["upload"], { name: adapter.name, tenant: otherTenant(adapter.tenant) })}>
        <Icon name="upload" /> New version
      </a>
      <Menu label="More actions">
        <button type="button" onClick={() => (editing.value = true)}>
          Edit description and tags
        </button>
        {adapter.pin ? (
          <button type="button" onClick={() => change("Unpinned.", () => call("DELETE", `${path}/residency`, { headers }))}>
            Unpin
          </button>
        ) : (
          <>
            <button type="button" onClick={() => pin("Pinned in adapter memory for an hour.", PIN_S)}>
              Pin for an hour
            </button>
            <button type="button" onClick={() => pin("Pinned in adapter memory until you unpin it.", null)}>
              Pin until unpinned
            </button>
          </>
        )}
        <button
          type="button"
          onClick={() =>
            change(
              adapter.enabled ? `Disabled ${adapter.name}: requests for it are refused.` : `Enabled ${adapter.name}.`,
              () => enable(!adapter.enabled),
              () => enable(adapter.enabled),
            )
          }
        >
          {adapter.enabled ? "Disable" : "Enable"}
        </button>
        <button type="button" class="is-danger" onClick={() => (deleting.value = true)}>
          Delete
        </button>
      </Menu>
      {rolling.value && <RollBackDialog adapter={adapter} onClose={() => (rolling.value = false)} onChange={onChange} />}
      {deleting.value && (
        <Dialog
          title={`Delete ${adapter.name}?`}
          confirm="Delete"
          danger
          typeToConfirm={adapter.name}
          onClose={() => (deleting.value = false)}
          onConfirm={async () => {
            await call("DELETE", `${path}?drain_s=${DRAIN_S}`, { headers });
            toast(`Deleted ${adapter.name}.`, () => call("POST", `${path}/restore`, { headers }));
            onGone();
          }}
        >
          <p>New requests for it are refused immediately; running requests get {DRAIN_S} s to finish. You can restore it for 24 hours.</p>
        </Dialog>
      )}
      {editing.value && <EditDialog adapter={adapter} onClose={() => (editing.value = false)} onChange={onChange} />}
    </div>
  );
}

interface ChangeDialogProps {
  adapter: AdapterDetail;
  onClose: () => void;
  onChange: () => void;
}

function RollBackDialog(props: ChangeDialogProps) {
  const { onClose, onChange } = props;
  // The adapter as it was when the dialog opened, so that the confirmed versions are the ones shown.
  const adapter = useRef(props.adapter).current;
  const live = adapter.aliases.find((alias) => alias.alias === "live");
  if (live?.previous == null) return null;
  return (
    <Dialog
      title={`Roll ${adapter.name} back to v${live.previous}?`}
      confirm="Roll back"
      onClose={onClose}
      onConfirm={async () => {
        await rollBack(adapter);
        toast(`Rolled ${adapter.name} back to v${live.previous}.`, restoreAlias(adapter, "live"));
        onChange();
      }}
    >
      <p>
        New requests for {adapter.name} get v{live.previous} instead of v{live.version}. Running requests finish with v
        {live.version}. Roll back again to undo.
      </p>
    </Dialog>
  );
}

function EditDialog(props: ChangeDialogProps) {
  const { onClose, onChange } = props;
  // The adapter as it was when the dialog opened, so that saving is refused if someone else changed it since.
  const adapter = useRef(props.adapter).current;
  const description = useSignal(adapter.description);
  const tags = useSignal(adapter.tags.join(", "));
  return (
    <Dialog
      title={`Edit ${adapter.name}`}
      confirm="Save"
      onClose={onClose}
      onConfirm={async () => {
        const words = tags.value.split(",").map((tag) => tag.trim());
        await call("PATCH", adapterPath(adapter.name), {
          headers: { ...tenantHeaders(adapter.tenant), "if-match": `"${adapter.rev}"` },
          body: { description: description.value, tags: words.filter(Boolean) },
        });
        onChange();
      }}
    >
      <Field label="Description">
        <textarea class="textarea" rows={3} value={description.value} onInput={(event) => (description.value = event.currentTarget.value)} />
      </Field>
      <Field label="Tags" hint="Separated by commas.">
        <input class="input" value={tags.value} onInput={(event) => (tags.value = event.currentTarget.value)} />
      </Field>
    </Dialog>
  );
}

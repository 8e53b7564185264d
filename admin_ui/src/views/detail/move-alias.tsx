import { useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";

import type { AdapterDetail, VersionItem } from "../../api/types";
import { Field } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { toast } from "../../parts/toasts";
import { moveAlias, restoreAlias } from "./adapter-api";
import { ConfigDiff } from "./config-diff";

const MAX_BP = 10_000;
const STEPS = [100, 500, 1000, 2500, 5000];

interface MoveAliasProps {
  adapter: AdapterDetail;
  version: VersionItem;
  /** The alias selected initially, such as one whose canary is to be changed. */
  alias?: string;
  onClose: () => void;
  onChange: () => void;
}

/** Shows what a move will change: from and to which version, for which users, and how the two versions differ. */
export function MoveAlias(props: MoveAliasProps) {
  const { version, onClose, onChange } = props;
  // The adapter as it was when the dialog opened, as the user saw it: the move is refused if someone else changed it since.
  const adapter = useRef(props.adapter).current;
  const isLive = adapter.aliases.some((known) => known.alias === "live" && known.version === version.n);
  const alias = useSignal(props.alias ?? (isLive ? "" : "live"));
  const running = adapter.aliases.find((known) => known.alias === props.alias)?.canary;
  const weight = useSignal(running?.version === version.n ? running.weight_bp : MAX_BP);
  const current = adapter.aliases.find((known) => known.alias === alias.value);
  const canary = weight.value < MAX_BP && current !== undefined;

  async function move(): Promise<void> {
    const undo = restoreAlias(adapter, alias.value);
    if (canary) await moveAlias(adapter, alias.value, current.version, { version: version.n, weight_bp: weight.value });
    else await moveAlias(adapter, alias.value, version.n);
    const done = canary ? `${weight.value / 100}% of users of ${alias.value} now get v${version.n}.` : `${alias.value} now points to v${version.n}.`;
    toast(done, undo);
    onChange();
  }

  return (
    <Dialog title={`Point an alias at v${version.n}`} confirm={canary ? "Start canary" : "Set alias"} onClose={onClose} onConfirm={move}>
      <Field label="Alias" hint="Requests for the bare adapter name get “live”; other aliases are requested as adapter@alias.">
        <input
          class="input mono"
          list="known-aliases"
          required
          pattern="[A-Za-z0-9][A-Za-z0-9._\-]{0,63}"
          value={alias.value}
          autocomplete="off"
          onInput={(event) => (alias.value = event.currentTarget.value)}
        />
      </Field>
      <datalist id="known-aliases">
        {adapter.aliases.map((known) => (
          <option key={known.alias} value={known.alias} />
        ))}
      </datalist>
      {current && current.version !== version.n && (
        <Field label="Rollout" hint="Users who already get the new version keep it when you raise the share.">
          <select class="select" value={weight.value} onChange={(event) => (weight.value = Number(event.currentTarget.value))}>
            <option value={MAX_BP}>Everyone</option>
            {[...new Set([...STEPS, ...(running ? [running.weight_bp] : [])])].sort((a, b) => a - b).map((step) => (
              <option key={step} value={step}>
                {step / 100}% of users; the rest stay on v{current.version}
              </option>
            ))}
          </select>
        </Field>
      )}
      <p class="move-preview" data-testid="move-preview">
        <code>
          {adapter.name}
          {alias.value !== "live" && `@${alias.value || "…"}`}
        </code>
        : {current ? `v${current.version}` : "new"} → <strong>v{version.n}</strong>
        {canary && ` for ${weight.value / 100}% of users`}
      </p>
      {current && current.version !== version.n && <ConfigDiff adapter={adapter} from={current.version} to={version.n} />}
    </Dialog>
  );
}

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
  /** Chosen at first, such as one whose canary is to be changed. */
  alias?: string;
  onClose: () => void;
  onChange: () => void;
}

/** Shows what a move changes before it is made: from where, to where, for whom, and what differs between the two. */
export function MoveAlias(props: MoveAliasProps) {
  const { version, onClose, onChange } = props;
  // As it was when the dialog opened: what is refused if somebody else changes it meanwhile is what the person saw.
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
    const done = canary ? `${weight.value / 100} % of the users of ${alias.value} get v${version.n}.` : `${alias.value} is v${version.n}.`;
    toast(done, undo);
    onChange();
  }

  return (
    <Dialog title={`Point an alias at v${version.n}`} confirm={canary ? "Start the canary" : "Move it"} onClose={onClose} onConfirm={move}>
      <Field label="Alias" hint="“live” is what the bare name means; others are named as adapter@alias.">
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
        <Field label="For whom" hint="A user who gets the new version keeps it while the share is raised.">
          <select class="select" value={weight.value} onChange={(event) => (weight.value = Number(event.currentTarget.value))}>
            <option value={MAX_BP}>Everybody</option>
            {[...new Set([...STEPS, ...(running ? [running.weight_bp] : [])])].sort((a, b) => a - b).map((step) => (
              <option key={step} value={step}>
                {step / 100} % of users, the others stay on v{current.version}
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
        {canary && ` for ${weight.value / 100} % of users`}
      </p>
      {current && current.version !== version.n && <ConfigDiff adapter={adapter} from={current.version} to={version.n} />}
    </Dialog>
  );
}

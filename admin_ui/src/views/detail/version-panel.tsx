import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { AdapterDetail, VersionItem } from "../../api/types";
import { TierMark } from "../../parts/adapter-state";
import { Amount, Chip, Id } from "../../parts/basics";
import { Dialog } from "../../parts/dialog";
import { ago, bytes, count, dateTime, milliseconds } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { toast } from "../../parts/toasts";
import { href, setQuery } from "../../router";
import { mayChange, otherTenant, tenantHeaders } from "../../state/session";
import { adapterPath, removeAlias, restoreAlias } from "./adapter-api";
import { MoveAlias } from "./move-alias";

const MAX_LABELS = 12;
const MAX_LABEL_CHARACTERS = 32;
const MAX_TOKENS = 12;

interface VersionPanelProps {
  adapter: AdapterDetail;
  version: VersionItem;
  onChange: () => void;
}

/** The version's facts and aliases, with the actions on it. */
export function VersionPanel({ adapter, version, onChange }: VersionPanelProps) {
  const moving = useSignal(false);
  const deleting = useSignal(false);
  const isLive = adapter.aliases.some((alias) => alias.alias === "live" && alias.version === version.n);
  const changeable = mayChange(adapter.tenant) && adapter.status !== "deleted";
  return (
    <section class="panel">
      <header class="panel-head">
        <h2>
          <code>
            {adapter.name}@v{version.n}
          </code>
        </h2>
        {changeable && (
          <>
            {isLive ? (
              <button type="button" class="button" onClick={() => (moving.value = true)}>
                <Icon name="flag" /> Add an alias
              </button>
            ) : (
              <button type="button" class="button is-primary" data-testid="make-live" onClick={() => (moving.value = true)}>
                <Icon name="flag" /> Make it live
              </button>
            )}
            {version.aliases.length === 0 && (
              <button type="button" class="button is-danger" onClick={() => (deleting.value = true)}>
                <Icon name="trash" /> Delete version
              </button>
            )}
          </>
        )}
      </header>
      <Facts adapter={adapter} version={version} onChange={onChange} changeable={changeable} />
      {moving.value && <MoveAlias adapter={adapter} version={version} onClose={() => (moving.value = false)} onChange={onChange} />}
      {deleting.value && (
        <Dialog
          title={`Delete ${adapter.name}@v${version.n}?`}
          confirm="Delete version"
          danger
          typeToConfirm={`v${version.n}`}
          onClose={() => (deleting.value = false)}
          onConfirm={async () => {
            await call("DELETE", adapterPath(adapter.name, `/versions/${version.n}`), { headers: tenantHeaders(adapter.tenant) });
            toast(`Deleted ${adapter.name}@v${version.n}.`);
            setQuery({ v: null });
            onChange();
          }}
        >
          <p>Its version number is never reused. This cannot be undone.</p>
        </Dialog>
      )}
    </section>
  );
}

function Facts({ adapter, version, onChange, changeable }: VersionPanelProps & { changeable: boolean }) {
  return (
    <dl class="facts panel-body">
      <dt>Aliases</dt>
      <dd class="cluster">
        {version.aliases.length === 0 && (
          <span class="muted">
            none; request it as {adapter.name}@v{version.n}
          </span>
        )}
        {version.aliases.map((alias) => (
          <span key={alias} class="chip is-accent">
            <span class="truncate" title={alias}>
              {alias}
            </span>
            {alias !== "live" && changeable && (
              <button type="button" class="chip-cross" aria-label={`Remove the alias ${alias}`} onClick={() => void drop(adapter, alias, onChange)}>
                <Icon name="cross" />
              </button>
            )}
          </span>
        ))}
      </dd>
      <dt>Content</dt>
      <dd>
        <Id value={version.digest} />
      </dd>
      <dt>Created</dt>
      <dd title={dateTime(version.created_at)}>
        {ago(version.created_at)} by <code>{version.by}</code>
      </dd>
      <dt>Size</dt>
      <dd>
        <Amount of={bytes(version.size_bytes)} />
      </dd>
      <dt>Rank</dt>
      <dd class="num">{version.max_rank}</dd>
      {(version.use_dora || version.use_rslora) && (
        <>
          <dt>Variant</dt>
          <dd>{[version.use_dora && "DoRA", version.use_rslora && "rsLoRA"].filter(Boolean).join(", ")}</dd>
        </>
      )}
      <dt>Targets</dt>
      <dd>{version.targets.join(", ")}</dd>
      {version.invocation !== null && (
        <>
          <dt>Activated by</dt>
          <dd class="cluster">
            {version.invocation.text !== null && <code>{version.invocation.text}</code>}
            <span class="muted">
              {version.invocation.token_ids.length === 1 ? "token" : "tokens"} {version.invocation.token_ids.join(", ")}
            </span>
          </dd>
        </>
      )}
      {version.classifier !== null && (
        <>
          <dt>Labels</dt>
          <dd class="cluster" data-testid="labels">
            {(version.classifier.labels ?? []).slice(0, MAX_LABELS).map((label, index) => (
              <span key={index} class="chip" dir="auto" title={label}>
                {label.length > MAX_LABEL_CHARACTERS ? `${label.slice(0, MAX_LABEL_CHARACTERS)}…` : label}
              </span>
            ))}
            <span class="muted">{howMany(version.classifier)}</span>
          </dd>
        </>
      )}
      {version.classifier?.score_template && (
        <>
          <dt>Ranking template</dt>
          <dd>
            <code class="template" dir="auto">
              {version.classifier.score_template}
            </code>
          </dd>
        </>
      )}
      {version.chat_template !== null && (
        <>
          <dt>Chat template</dt>
          <dd class="cluster">
            <code>{version.chat_template}</code>
            {version.chat_template_missing && (
              <Chip tone="warn" icon="warn">
                missing
              </Chip>
            )}
          </dd>
        </>
      )}
      {version.trained_token_ids.length > 0 && (
        <>
          <dt>Trained tokens</dt>
          <dd class="num">{shortened(version.trained_token_ids, MAX_TOKENS)}</dd>
        </>
      )}
      {version.own_tables.length > 0 && (
        <>
          <dt>Own tables</dt>
          <dd>
            <code>{version.own_tables.join(", ")}</code>
          </dd>
        </>
      )}
      {version.bases.length > 0 && (
        <>
          <dt>Made for</dt>
          <dd>{version.bases.join(", ")}</dd>
        </>
      )}
      <dt>Tier</dt>
      <dd class="cluster">
        <TierMark tier={version.tier} />
        {version.load_ms !== null && (
          <span class="muted">
            loaded in <Amount of={milliseconds(version.load_ms)} />
          </span>
        )}
      </dd>
      <dt>Requests</dt>
      <dd>
        <a href={href(["requests"], { adapter: adapter.name, tenant: adapter.tenant === "shared" ? null : otherTenant(adapter.tenant) })}>
          <Amount of={count(version.num_hits)} />
        </a>
        <span class="muted"> since this server started{version.last_used_at !== null && `, most recently ${ago(version.last_used_at)}`}</span>
      </dd>
    </dl>
  );
}

/** "5, 17, 250", or the first `max` and how many more there are. */
function shortened(numbers: number[], max: number): string {
  const more = numbers.length - max;
  return numbers.slice(0, max).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

/** What the listed names do not say: how many labels are missing there, and the problem type. */
function howMany({ num_labels, labels, problem_type }: NonNullable<VersionItem["classifier"]>): string {
  const more = num_labels - Math.min(MAX_LABELS, labels?.length ?? 0);
  const number = labels == null ? `${num_labels} unnamed` : more > 0 ? `and ${more} more` : "";
  const meaning = problem_type === null ? "" : `(${problem_type.replaceAll("_", " ")})`;
  return `${number} ${meaning}`.trim();
}

async function drop(adapter: AdapterDetail, alias: string, onChange: () => void): Promise<void> {
  try {
    await removeAlias(adapter, alias);
    toast(`Removed the alias ${alias}.`, restoreAlias(adapter, alias));
  } catch (error) {
    toast(error instanceof Error ? error.message : String(error));
  }
  onChange();
}

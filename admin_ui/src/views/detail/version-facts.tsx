import { useSignal } from "@preact/signals";

import { ApiError, call } from "../../api/client";
import type { AdapterDetail, CheckItem, ReportItem, VersionItem } from "../../api/types";
import { TierMark } from "../../parts/adapter-state";
import { Amount, Id } from "../../parts/basics";
import { ago, bytes, count, dateTime, milliseconds } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { Report } from "../../parts/report";
import { SkeletonRows, View } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { Dialog } from "../../parts/dialog";
import { usePolled } from "../../state/polled";
import { mayChange, tenantHeaders } from "../../state/session";
import { adapterPath, removeAlias, restoreAlias } from "./adapter-api";
import { ConfigDiff } from "./config-diff";
import { MoveAlias } from "./move-alias";
import { Certificate } from "./certificate";

/** Everything about one version: what it is, what leads to it, how it was checked, and its configuration beside the live one's. */
export function VersionFacts({ adapter, version, onChange }: { adapter: AdapterDetail; version: VersionItem; onChange: () => void }) {
  const moving = useSignal(false);
  const deleting = useSignal(false);
  const live = adapter.aliases.find((alias) => alias.alias === "live");
  const liveVersion = adapter.versions.find((known) => known.n === live?.version);
  const headers = tenantHeaders(adapter.tenant);
  const path = adapterPath(adapter.name, `/versions/${version.n}`);
  // A deleted adapter keeps its history; its files are not served.
  const kept = adapter.status !== "deleted";

  return (
    <div class="stack">
      <section class="panel">
        <header class="panel-head">
          <h2>
            <code>
              {adapter.name}@v{version.n}
            </code>
          </h2>
          {mayChange(adapter.tenant) && kept && (
            <>
              {live?.version !== version.n && (
                <button type="button" class="button is-primary" data-testid="make-live" onClick={() => (moving.value = true)}>
                  <Icon name="flag" /> Make it live
                </button>
              )}
              {live?.version === version.n && (
                <button type="button" class="button" onClick={() => (moving.value = true)}>
                  <Icon name="flag" /> Add an alias
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
        <dl class="facts panel-body">
          <dt>Aliases</dt>
          <dd class="cluster">
            {version.aliases.length === 0 && <span class="muted">none; requests name it as {adapter.name}@v{version.n}</span>}
            {version.aliases.map((alias) => (
              <span key={alias} class="chip is-accent">
                {alias}
                {alias !== "live" && mayChange(adapter.tenant) && kept && (
                  <button type="button" class="chip-cross" aria-label={`Remove the alias ${alias}`} onClick={() => drop(alias)}>
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
          <dt>Made</dt>
          <dd title={dateTime(version.created_at)}>
            {ago(version.created_at)} by <code>{version.by}</code>
          </dd>
          <dt>Size</dt>
          <dd>
            <Amount of={bytes(version.size_bytes)} />
          </dd>
          <dt>Rank</dt>
          <dd class="num">{version.max_rank}</dd>
          <dt>Targets</dt>
          <dd>{version.targets.join(", ")}</dd>
          <dt>Where it is</dt>
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
            <Amount of={count(version.num_hits)} />
            <span class="muted"> since this server started{version.last_used_at !== null && `, the last ${ago(version.last_used_at)}`}</span>
          </dd>
        </dl>
      </section>
      {kept && <Certificate name={adapter.name} tenant={adapter.tenant} version={version.n} />}
      {kept && liveVersion && liveVersion.n !== version.n && <ConfigDiff adapter={adapter} from={liveVersion.n} to={version.n} />}
      {kept && <Checks key={path} path={path} headers={headers} />}
      {moving.value && <MoveAlias adapter={adapter} version={version} onClose={() => (moving.value = false)} onChange={onChange} />}
      {deleting.value && (
        <Dialog
          title={`Delete ${adapter.name}@v${version.n}?`}
          confirm="Delete version"
          danger
          typeToConfirm={`v${version.n}`}
          onClose={() => (deleting.value = false)}
          onConfirm={async () => {
            await call("DELETE", path, { headers });
            toast(`Deleted ${adapter.name}@v${version.n}.`);
            onChange();
          }}
        >
          <p>Its number is never used again. This cannot be undone.</p>
        </Dialog>
      )}
    </div>
  );

  async function drop(alias: string): Promise<void> {
    try {
      await removeAlias(adapter, alias);
      toast(`Removed the alias ${alias}.`, async () => {
        await restoreAlias(adapter, alias)();
        onChange();
      });
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    }
    onChange();
  }
}

function Checks({ path, headers }: { path: string; headers: Record<string, string> }) {
  const report = usePolled(
    `${path}/report`,
    async (signal): Promise<CheckItem[]> => {
      try {
        return (await call<ReportItem>("GET", `${path}/report`, { signal, headers })).data.checks;
      } catch (error) {
        if (error instanceof ApiError && error.status === 404) return [];
        throw error;
      }
    },
    0,
  );
  return (
    <section>
      <h2 class="section-title">How it was checked</h2>
      <View of={report} skeleton={<SkeletonRows rows={2} />}>
        {(checks) => (checks.length === 0 ? <p class="muted">There is no report of this version.</p> : <Report checks={checks} />)}
      </View>
    </section>
  );
}

import "./detail.css";

import { useSignal } from "@preact/signals";

import { call } from "../../api/client";
import type { AdapterDetail } from "../../api/types";
import { StatusChip, TierMark } from "../../parts/adapter-state";
import { Chip } from "../../parts/basics";
import { Icon } from "../../parts/icon";
import { SkeletonRows, View } from "../../parts/states";
import { go, href, place } from "../../router";
import { usePolled } from "../../state/polled";
import { mayChange, otherTenant, tenantHeaders } from "../../state/session";
import { Actions } from "./actions";
import { CanaryBar } from "./canary-bar";
import { adapterPath } from "./adapter-api";
import { Traffic } from "./traffic";
import { UseIt } from "./use-it";
import { VersionFacts } from "./version-facts";
import { VersionLane } from "./version-lane";

const TABS = [
  { id: "version", title: "Version" },
  { id: "traffic", title: "Traffic" },
  { id: "use", title: "Use it" },
];

/** One adapter: its versions and aliases, its traffic, and how to call it. */
export function Detail({ name }: { name: string }) {
  const query = place.value.query;
  const tenant = query.get("tenant");
  const adapter = usePolled(
    `${tenant}/${name}`,
    async (signal) => (await call<AdapterDetail>("GET", adapterPath(name), { signal, headers: tenantHeaders(tenant) })).data,
    3000,
  );
  return (
    <View
      of={adapter}
      whole
      skeleton={<SkeletonRows rows={6} height={56} />}
      otherwise={
        <a class="button" href={href(["adapters"])}>
          All adapters
        </a>
      }
    >
      {(found) => <Found adapter={found} onChange={adapter.refresh} />}
    </View>
  );
}

function Found({ adapter, onChange }: { adapter: AdapterDetail; onChange: () => void }) {
  const query = place.value.query;
  const tab = query.get("tab") ?? "version";
  const find = (n: number | undefined) => adapter.versions.find((known) => known.n === n);
  const asked = Number(query.get("v")) || undefined;
  const found = find(asked);
  const version = found ?? find(adapter.aliases.find((alias) => alias.alias === "live")?.version) ?? adapter.versions[0] ?? null;
  const editing = useSignal(false);

  return (
    <>
      <div class="page-head">
        <h1 class="detail-name">
          <span class="truncate">{adapter.name}</span>
          <StatusChip status={adapter.status} />
          <TierMark tier={adapter.tier} pinned={adapter.pin !== null} />
          {adapter.tenant === "shared" && <Chip icon="tenants">shared with all tenants</Chip>}
        </h1>
        {mayChange(adapter.tenant) && <Actions adapter={adapter} editing={editing} onChange={onChange} onGone={() => go(href(["adapters"]))} />}
        {adapter.description && <p>{adapter.description}</p>}
        {adapter.tags.length > 0 && (
          <div class="cluster detail-tags">
            {adapter.tags.map((tag) => (
              <a key={tag} class="chip" href={href(["adapters"], { tag })}>
                {tag}
              </a>
            ))}
          </div>
        )}
      </div>
      {asked && !found && version && (
        <p class="notice is-warn" role="status" data-testid="no-such-version">
          <Icon name="warn" /> Version {asked} does not exist or was deleted. Showing version {version.n}.
        </p>
      )}
      <VersionLane adapter={adapter} chosen={version?.n ?? null} />
      {adapter.aliases.map((alias) => alias.canary && <CanaryBar key={alias.alias} adapter={adapter} alias={alias} onChange={onChange} />)}
      <nav class="tabs detail-tabs" aria-label="About this adapter">
        {TABS.map(({ id, title }) => (
          <a
            key={id}
            class="tab"
            href={href(["adapters", adapter.name], { ...Object.fromEntries(query), tab: id === "version" ? null : id })}
            aria-current={tab === id ? "page" : undefined}
          >
            {id === "version" && version ? `Version ${version.n}` : title}
          </a>
        ))}
      </nav>
      {tab === "version" && version && <VersionFacts adapter={adapter} version={version} onChange={onChange} />}
      {tab === "version" && !version && (
        <div class="state">
          <Icon name="info" />
          <h2>No version yet</h2>
          <a class="button is-primary" href={href(["upload"], { name: adapter.name, tenant: otherTenant(adapter.tenant) })}>
            Upload the first version
          </a>
        </div>
      )}
      {tab === "traffic" && <Traffic name={adapter.name} tenant={adapter.tenant} />}
      {tab === "use" && <UseIt adapter={adapter} version={version} />}
    </>
  );
}

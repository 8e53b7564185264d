import "./settings.css";

import { call } from "../../api/client";
import type { ConfigItem } from "../../api/types";
import { Chip } from "../../parts/basics";
import { Icon } from "../../parts/icon";
import { Empty, SkeletonRows, View } from "../../parts/states";
import { place, setQuery } from "../../router";
import { usePolled } from "../../state/polled";
import { session } from "../../state/session";

const SHOWN = [
  { shown: "all", title: "All" },
  { shown: "set", title: "Non-default" },
];

/** The configuration in force. Read-only here: it is set when the server is started. */
export function Settings() {
  const config = usePolled("config", async (signal) => (await call<{ data: ConfigItem[] }>("GET", "/v1/config", { signal })).data.data, 0);
  const query = place.value.query;
  const shown = query.get("shown") ?? "all";
  const needle = (query.get("q") ?? "").toLowerCase();
  return (
    <>
      <div class="page-head">
        <h1>Settings</h1>
        <p>
          loraserve {session.value?.version}, serving {session.value?.model}. Settings come from flags, LORASERVE_ environment variables or a --config file; changes take effect after a restart.
        </p>
      </div>
      <div class="filters">
        <label class="filter-search">
          <span class="visually-hidden">Search settings</span>
          <Icon name="search" />
          <input class="input" type="search" placeholder="Search settings" value={query.get("q") ?? ""} onInput={(event) => setQuery({ q: event.currentTarget.value || null })} />
        </label>
        <div class="segmented" role="group" aria-label="Settings shown">
          {SHOWN.map(({ shown: value, title }) => (
            <button key={value} type="button" aria-pressed={value === shown} onClick={() => setQuery({ shown: value === "all" ? null : value })}>
              {title}
            </button>
          ))}
        </div>
      </div>
      <View of={config} skeleton={<SkeletonRows rows={16} />}>
        {(items) => {
          const found = items.filter((item) => (shown === "all" || item.source !== "default") && `${item.name} ${item.value} ${item.help}`.toLowerCase().includes(needle));
          return found.length === 0 ? <Empty icon="search" title="No matching settings" command="loraserve serve --help" /> : <Table items={found} />;
        }}
      </View>
    </>
  );
}

function Table({ items }: { items: ConfigItem[] }) {
  return (
    <div class="panel scroll-x">
      <table class="table is-cards settings-table">
        <caption class="visually-hidden">Settings</caption>
        <thead>
          <tr>
            <th>Setting</th>
            <th>Value</th>
            <th>Source</th>
          </tr>
        </thead>
        <tbody>
          {items.map((item) => (
            <tr key={item.name} data-testid="setting">
              <th scope="row">
                <code>--{item.name}</code>
                {item.help && <span class="muted small">{item.help}</span>}
              </th>
              <td class="setting-value">{item.value ? <code>{item.value}</code> : <span class="muted">–</span>}</td>
              <td class="setting-source">{item.source === "default" ? <span class="muted">default</span> : <Chip tone={item.source === "derived" ? "neutral" : "accent"}>{item.source}</Chip>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

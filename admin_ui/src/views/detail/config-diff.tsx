import { call } from "../../api/client";
import type { AdapterDetail } from "../../api/types";
import { SkeletonRows, View } from "../../parts/states";
import { usePolled } from "../../state/polled";
import { tenantHeaders } from "../../state/session";
import { adapterPath } from "./adapter-api";

type Config = Record<string, unknown>;

/** The fields of adapter_config.json in which two versions differ. */
export function ConfigDiff({ adapter, from, to }: { adapter: AdapterDetail; from: number; to: number }) {
  const configs = usePolled(
    `${adapter.tenant}/${adapter.name}/${from}/${to}`,
    async (signal) => Promise.all([from, to].map((version) => fetchConfig(adapter, version, signal))),
    0,
  );
  return (
    <section class="config-diff">
      <h3>
        Configuration, v{from} → v{to}
      </h3>
      <View of={configs} skeleton={<SkeletonRows rows={2} height={28} />}>
        {([before, after]) => <Differences before={before ?? {}} after={after ?? {}} />}
      </View>
    </section>
  );
}

function Differences({ before, after }: { before: Config; after: Config }) {
  const keys = [...new Set([...Object.keys(before), ...Object.keys(after)])].sort();
  const changed = keys.filter((key) => text(before[key]) !== text(after[key]));
  if (changed.length === 0) return <p class="muted">The configuration is the same; only the weights differ.</p>;
  return (
    <table class="table diff-table">
      <thead class="visually-hidden">
        <tr>
          <th>Field</th>
          <th>Before</th>
          <th>After</th>
        </tr>
      </thead>
      <tbody>
        {changed.map((key) => (
          <tr key={key}>
            <th scope="row">
              <code>{key}</code>
            </th>
            <td>
              <del>{text(before[key])}</del>
            </td>
            <td>
              <ins>{text(after[key])}</ins>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

async function fetchConfig(adapter: AdapterDetail, version: number, signal: AbortSignal): Promise<Config> {
  const path = adapterPath(adapter.name, `/versions/${version}/files/adapter_config.json`);
  return (await call<Config>("GET", path, { signal, headers: tenantHeaders(adapter.tenant) })).data;
}

function text(value: unknown): string {
  return value === undefined ? "–" : Array.isArray(value) ? [...value].map(String).sort().join(", ") : JSON.stringify(value);
}

import { download } from "../../api/download";
import type { AuditItem } from "../../api/types";
import { cli } from "../../parts/commands";
import { Icon } from "../../parts/icon";
import { Empty, ListView, SkeletonRows } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { place } from "../../router";
import { usePaged } from "../../state/paged";
import { AuditEntry } from "./audit-entry";
import { FilterBar } from "./filter-bar";

const KINDS = ["adapter", "key", "tenant", "session", "request"];
const FORMATS = [
  { format: "csv", title: "Export CSV" },
  { format: "ndjson", title: "Export JSON lines" },
];
const REFRESH_MS = 10_000;

export function AuditLog() {
  const query = new URLSearchParams([...place.value.query].filter(([name, value]) => value && ["actor", "action", "kind"].includes(name)));
  const list = usePaged<AuditItem>(`/v1/audit${query.size ? `?${query}` : ""}`, 100, REFRESH_MS);

  function save(format: string): void {
    const path = `/v1/audit?${new URLSearchParams([...query, ["format", format]])}`;
    download(path, `audit.${format}`).catch((error: unknown) => toast(error instanceof Error ? error.message : String(error)));
  }

  return (
    <>
      <FilterBar
        fields={[
          { name: "actor", label: "Actor" },
          { name: "action", label: "Action, such as alias." },
        ]}
        choices={[{ name: "kind", label: "Any kind", values: KINDS.map((kind) => [kind, kind] as const) }]}
      >
        {FORMATS.map(({ format, title }) => (
          <button key={format} type="button" class="button" disabled={!list.rows.value?.length} onClick={() => save(format)}>
            <Icon name="file" /> {title}
          </button>
        ))}
      </FilterBar>
      <ListView of={list} skeleton={<SkeletonRows />} older="Older entries">
        {(rows) =>
          rows.length === 0 ? (
            <Empty icon="requests" title={query.size ? "No matching entries" : "No changes yet"} command={cli("adapter add my-adapter ./path/to/adapter")}>
              Every change to a tenant, key or adapter appears here, with who made it and the previous values.
            </Empty>
          ) : (
            <ul class="panel">
              {rows.map((row) => (
                <AuditEntry key={row.id} row={row} />
              ))}
            </ul>
          )
        }
      </ListView>
    </>
  );
}

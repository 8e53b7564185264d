import { useSignal } from "@preact/signals";

import type { AuditItem } from "../../api/types";
import { Chip } from "../../parts/basics";
import { ago, dateTime } from "../../parts/format";
import { Empty, Failure, SkeletonRows } from "../../parts/states";
import { place } from "../../router";
import { usePaged } from "../../state/paged";
import { FilterBar } from "./filter-bar";

const KINDS = ["adapter", "key", "tenant", "session"];
const REFRESH_MS = 10_000;

export function AuditLog() {
  const query = new URLSearchParams([...place.value.query].filter(([name, value]) => value && ["actor", "action", "kind"].includes(name)));
  const list = usePaged<AuditItem>(`/v1/audit${query.size ? `?${query}` : ""}`, 100, REFRESH_MS);
  const rows = list.rows.value;
  return (
    <>
      <FilterBar
        fields={[
          { name: "actor", label: "Who" },
          { name: "action", label: "What, such as alias.move" },
        ]}
        choices={{ name: "kind", label: "Any kind", values: KINDS }}
        exported={rows ?? []}
        fileName="audit.json"
      />
      {rows === null && (list.error.value ? <Failure error={list.error.value} retry={list.refresh} /> : <SkeletonRows />)}
      {rows?.length === 0 && <Empty icon="requests" title={query.size ? "No entry matches" : "Nothing was changed yet"} />}
      {rows !== null && rows.length > 0 && (
        <ul class="panel">
          {rows.map((row) => (
            <Entry key={row.id} row={row} />
          ))}
        </ul>
      )}
      {list.hasMore.value && (
        <button type="button" class="button more" onClick={list.loadMore}>
          Older entries
        </button>
      )}
    </>
  );
}

function Entry({ row }: { row: AuditItem }) {
  const open = useSignal(false);
  const changed = row.before !== null || row.after !== null;
  return (
    <li class="audit-entry" data-testid="audit-entry">
      <div class="audit-row">
        <span class="muted num audit-when" title={dateTime(row.at)}>
          {ago(row.at)}
        </span>
        <code>{row.actor}</code>
        <span class="strong">{row.action}</span>
        <span class="truncate">{row.subject}</span>
        {row.outcome === "refused" && (
          <Chip tone="bad" icon="lock">
            refused
          </Chip>
        )}
        {changed && (
          <button type="button" class="button is-quiet" aria-expanded={open.value} onClick={() => (open.value = !open.value)}>
            {open.value ? "Hide" : "Before and after"}
          </button>
        )}
      </div>
      {open.value && (
        <div class="audit-change">
          <Side title="Before" body={row.before} />
          <Side title="After" body={row.after} />
        </div>
      )}
    </li>
  );
}

function Side({ title, body }: { title: string; body: unknown }) {
  return (
    <figure>
      <figcaption class="muted small">{title}</figcaption>
      <pre tabIndex={0}>{body === null || body === undefined ? "–" : JSON.stringify(body, null, 2)}</pre>
    </figure>
  );
}

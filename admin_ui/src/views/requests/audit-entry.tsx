import { useSignal } from "@preact/signals";

import type { AuditItem } from "../../api/types";
import { Chip, CopyButton } from "../../parts/basics";
import { changesOf, valueText } from "../../parts/changes";
import { ago, dateTime } from "../../parts/format";
import { href, setQuery } from "../../router";

/** One audit entry: who did what to which object and, when expanded, what changed. */
export function AuditEntry({ row }: { row: AuditItem }) {
  const open = useSignal(false);
  const changed = row.before !== null || row.after !== null;
  return (
    <li class="audit-entry" data-testid="audit-entry">
      <div class="audit-row">
        <span class="muted num audit-when" title={dateTime(row.at)}>
          {ago(row.at)}
        </span>
        <button type="button" class="link audit-who" title={`Show only entries by ${row.actor}`} onClick={() => setQuery({ actor: row.actor })}>
          <code>{row.actor}</code>
        </button>
        <span class="strong audit-what">{row.action}</span>
        <span class="audit-subject">
          <Subject row={row} />
          {row.detail && <span class="muted"> {row.detail}</span>}
        </span>
        {row.outcome === "refused" && (
          <Chip tone="bad" icon="lock">
            refused
          </Chip>
        )}
        {changed && (
          <button type="button" class="button is-quiet audit-open" aria-expanded={open.value} onClick={() => (open.value = !open.value)}>
            {open.value ? "Hide changes" : "Show changes"}
          </button>
        )}
      </div>
      {open.value && <Changes row={row} />}
    </li>
  );
}

/** The object of the action, as a link if it has a view. */
function Subject({ row }: { row: AuditItem }) {
  if (row.kind === "adapter") {
    const [tenant = "", name = ""] = row.subject.split("/", 2);
    return <a href={href(["adapters", name], { tenant })}>{row.subject}</a>;
  }
  if (row.kind === "key") return <a href={href(["requests"], { key_id: row.subject })}>{row.subject}</a>;
  if (row.kind === "tenant") return <a href={href(["access"])}>{row.subject}</a>;
  return <>{row.subject}</>;
}

function Changes({ row }: { row: AuditItem }) {
  const changes = changesOf(row.before ?? {}, row.after ?? {});
  return (
    <div class="audit-change" data-testid="audit-change">
      {changes.length === 0 ? (
        <p class="muted">No differences.</p>
      ) : (
        <div class="scroll-x">
          <table class="table diff-table">
            <thead>
              <tr>
                <th>Field</th>
                <th>Before</th>
                <th>After</th>
              </tr>
            </thead>
            <tbody>
              {changes.map(({ path, before, after }) => (
                <tr key={path}>
                  <th scope="row">
                    <code>{path}</code>
                  </th>
                  <td>
                    <del>{valueText(before, path)}</del>
                  </td>
                  <td>
                    <ins>{valueText(after, path)}</ins>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      <p class="muted small">
        {dateTime(row.at)} · request <code>{row.request_id}</code> <CopyButton text={row.request_id} label="Copy the request ID" />
      </p>
    </div>
  );
}

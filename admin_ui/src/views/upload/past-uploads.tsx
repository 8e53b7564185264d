import type { UploadItem } from "../../api/types";
import { Chip } from "../../parts/basics";
import { ago, dateTime } from "../../parts/format";
import { SkeletonRows, View } from "../../parts/states";
import { href } from "../../router";
import type { Polled } from "../../state/polled";
import { otherTenant } from "../../state/session";
import { MARK } from "./upload-states";

interface PastUploadsProps {
  uploads: Polled<UploadItem[]>;
  /** Their tenant, if it is not the one that is shown. */
  of: string | null;
}

/** Everyone's upload sessions of the last 24 hours; each has a page with its report. */
export function PastUploads({ uploads, of }: PastUploadsProps) {
  return (
    <section class="past-uploads" aria-labelledby="past-uploads">
      <h2 id="past-uploads">
        Recent uploads
        {of && <span class="muted"> of {of}</span>}
      </h2>
      <View of={uploads} skeleton={<SkeletonRows rows={3} />}>
        {(items) =>
          items.length === 0 ? (
            <p class="muted">No uploads in the last 24 hours.</p>
          ) : (
            <ul class="panel">
              {items.map((item) => (
                <Row key={item.id} item={item} />
              ))}
            </ul>
          )
        }
      </View>
    </section>
  );
}

function Row({ item }: { item: UploadItem }) {
  const failed = item.report?.checks.filter((check) => check.status === "fail") ?? [];
  const why = failed[0]?.message ?? item.error ?? "";
  return (
    <li class="past-upload" data-testid="past-upload">
      <span class="past-upload-state">
        <Chip {...(MARK[item.state] ?? {})}>{item.state}</Chip>
      </span>
      <a class="truncate" title={item.adapter} href={href(["upload", item.id], { tenant: otherTenant(item.tenant) })}>
        {item.adapter}
        {item.result && ` v${item.result.version}`}
      </a>
      <span class="muted small truncate past-upload-why" title={why}>
        {why}
        {failed.length > 1 && `, and ${failed.length - 1} more`}
      </span>
      <span class="muted small num past-upload-time" title={dateTime(item.created_at)}>
        {ago(item.created_at)}
      </span>
    </li>
  );
}

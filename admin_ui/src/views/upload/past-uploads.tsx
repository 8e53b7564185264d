import { useSignal } from "@preact/signals";

import type { UploadItem } from "../../api/types";
import { Chip, type Tone } from "../../parts/basics";
import { ago } from "../../parts/format";
import type { IconName } from "../../parts/icon";
import { Report } from "../../parts/report";
import { SkeletonRows, View } from "../../parts/states";
import { href } from "../../router";
import type { Polled } from "../../state/polled";

const MARK: Record<string, { tone: Tone; icon: IconName }> = {
  open: { tone: "accent", icon: "upload" },
  validating: { tone: "accent", icon: "clock" },
  loading: { tone: "accent", icon: "clock" },
  ready: { tone: "ok", icon: "check" },
  rejected: { tone: "bad", icon: "cross" },
  failed: { tone: "bad", icon: "warn" },
  expired: { tone: "neutral", icon: "clock" },
  aborted: { tone: "neutral", icon: "cross" },
};

/** Sessions of the last day, whoever began them, with their reports. */
export function PastUploads({ uploads }: { uploads: Polled<UploadItem[]> }) {
  return (
    <section class="past-uploads" aria-labelledby="past-uploads">
      <h2 id="past-uploads">Recent uploads</h2>
      <View of={uploads} skeleton={<SkeletonRows rows={3} />}>
        {(items) =>
          items.length === 0 ? (
            <p class="muted">None in the last day.</p>
          ) : (
            <ul class="panel">
              {items.map((item) => (
                <PastUpload key={item.id} item={item} />
              ))}
            </ul>
          )
        }
      </View>
    </section>
  );
}

function PastUpload({ item }: { item: UploadItem }) {
  const open = useSignal(false);
  const numFailed = item.report?.checks.filter((check) => check.status === "fail").length ?? 0;
  const mark = MARK[item.state] ?? { tone: "neutral" as Tone, icon: "info" as IconName };
  return (
    <li class="past-upload">
      <div class="past-upload-row">
        <Chip tone={mark.tone} icon={mark.icon}>
          {item.state}
        </Chip>
        {item.state === "ready" ? (
          <a class="truncate" href={href(["adapters", item.adapter])}>
            {item.adapter}
            {item.result && ` v${item.result.version}`}
          </a>
        ) : (
          <span class="truncate">{item.adapter}</span>
        )}
        {item.report && (
          <button type="button" class="button is-quiet" aria-expanded={open.value} onClick={() => (open.value = !open.value)}>
            {numFailed > 0 ? `${numFailed} failed` : "Report"}
          </button>
        )}
        <span class="muted small num past-upload-time">{ago(item.created_at)}</span>
      </div>
      {item.error && <p class="muted small">{item.error}</p>}
      {open.value && item.report && <Report checks={item.report.checks} />}
    </li>
  );
}

import "./report.css";

import { useSignal } from "@preact/signals";

import type { CheckItem } from "../api/types";
import { Icon, type IconName } from "./icon";

const GROUPS: { status: string; title: (n: number) => string; icon: IconName }[] = [
  { status: "fail", title: (n) => (n === 1 ? "1 check failed" : `${n} checks failed`), icon: "cross" },
  { status: "warn", title: (n) => (n === 1 ? "1 warning" : `${n} warnings`), icon: "warn" },
  { status: "pass", title: (n) => (n === 1 ? "1 check passed" : `${n} checks passed`), icon: "check" },
];

/** Validation results: failures first and expanded, passed checks collapsed. */
export function Report({ checks }: { checks: CheckItem[] }) {
  return (
    <div class="report" data-testid="report">
      {GROUPS.map((group) => (
        <Group key={group.status} {...group} checks={checks.filter((check) => check.status === group.status)} />
      ))}
    </div>
  );
}

function Group({ status, title, icon, checks }: (typeof GROUPS)[number] & { checks: CheckItem[] }) {
  const open = useSignal(status !== "pass");
  if (checks.length === 0) return null;
  return (
    <details class={`report-group is-${status}`} open={open.value} onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>
        <Icon name={icon} />
        <span class="strong">{title(checks.length)}</span>
        <Icon name="down" />
      </summary>
      <ul>
        {checks.map((check, index) => (
          <Check key={index} check={check} />
        ))}
      </ul>
    </details>
  );
}

function Check({ check }: { check: CheckItem }) {
  const { file, key, found, expected, remedy } = check;
  return (
    <li class="report-check" data-testid={`check-${check.status}`}>
      <span class="report-name">{check.name}</span>
      {(file || key) && (
        <span class="report-where">
          {file && <code>{file}</code>}
          {file && key && <span class="muted"> · </span>}
          {key && <code>{key}</code>}
        </span>
      )}
      {found || expected ? (
        <span class="report-compare">
          {found && <code class="report-found">{found}</code>}
          {found && expected && <Icon name="arrow" />}
          {expected && <span>{expected}</span>}
        </span>
      ) : (
        <span class="report-compare">{check.message}</span>
      )}
      {check.status !== "pass" && (
        <span class="report-remedy">
          {(found || expected) && reason(check)} {remedy}
        </span>
      )}
    </li>
  );
}

/** The part of the message that is not already shown next to it, as a sentence. */
function reason({ message, file, key, found, expected }: CheckItem): string {
  const rest = [file, key, `found ${found}, expected ${expected}`].reduce<string>(
    (left, shown) => (shown && left.startsWith(shown) ? left.slice(shown.length).replace(/^[:,] /, "") : left),
    message,
  );
  return rest && `${rest[0]?.toUpperCase()}${rest.slice(1)}.`;
}

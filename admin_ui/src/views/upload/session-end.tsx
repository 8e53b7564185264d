import type { UploadItem } from "../../api/types";
import { Icon, type IconName } from "../../parts/icon";
import { Report } from "../../parts/report";
import { href } from "../../router";
import { otherTenant } from "../../state/session";

const PHASES = [
  { state: "open", title: "Uploading" },
  { state: "validating", title: "Checking" },
  { state: "loading", title: "Testing" },
  { state: "ready", title: "Live" },
];

const END: Record<string, { icon: IconName; title: string }> = {
  rejected: { icon: "cross", title: "Upload rejected" },
  failed: { icon: "warn", title: "Upload failed" },
  expired: { icon: "clock", title: "Upload expired" },
  aborted: { icon: "cross", title: "Upload canceled" },
};

/** The phases of an upload; if it was rejected, the phase where that happened is marked. */
export function Stepper({ state, activate }: { state: string; activate: boolean }) {
  const refused = state === "rejected";
  const reached = PHASES.findIndex((phase) => phase.state === (refused ? "validating" : state));
  return (
    <ol class="stepper" aria-label="Progress" data-testid="stepper" data-state={state}>
      {PHASES.map(({ state: phase, title }, index) => {
        const done = index < reached || state === "ready";
        const current = index === reached && state !== "ready";
        return (
          <li key={phase} class={done ? "is-done" : current ? (refused ? "is-refused" : "is-current") : ""} aria-current={current ? "step" : undefined}>
            <span class="step-mark">{done ? <Icon name="check" /> : current && refused ? <Icon name="cross" /> : index + 1}</span>
            <span>{phase === "ready" && !activate ? "Ready" : title}</span>
          </li>
        );
      })}
    </ol>
  );
}

/** How the upload ended, if it has, and the validation report. */
export function SessionEnd({ session }: { session: UploadItem }) {
  const end = END[session.state];
  return (
    <>
      {end && (
        <div class="upload-end is-bad" role="alert" data-testid={`upload-${session.state}`}>
          <Icon name={end.icon} />
          <div>
            <h2>{end.title}. Nothing was changed.</h2>
            {session.error && <p>{session.error}</p>}
          </div>
        </div>
      )}
      {session.state === "ready" && session.result && <Ready session={session} result={session.result} />}
      {session.report && <Report checks={session.report.checks} />}
    </>
  );
}

/** Only classifiers have labels; they do not generate text. */
function isClassifier(session: UploadItem): boolean {
  return session.report?.checks.some((check) => check.name === "weights.labels") ?? false;
}

function Ready({ session, result }: { session: UploadItem; result: NonNullable<UploadItem["result"]> }) {
  const live = session.activate || result.version === 1;
  const name = `${session.adapter}@v${result.version}`;
  const asked = isClassifier(session) ? { columns: name, mode: "classify" } : { columns: `,${name}` };
  return (
    <div class="upload-end is-ok" role="status" data-testid="upload-ready">
      <Icon name="check" />
      <div>
        <h2>{result.created ? `Version ${result.version} is ${live ? "live" : "ready"}` : `This content already exists as version ${result.version}`}</h2>
        <div class="cluster">
          <a class="button is-primary" href={href(["playground"], { ...asked, tenant: otherTenant(session.tenant) })}>
            <Icon name="play" /> {isClassifier(session) ? "Try it" : "Try it next to the base model"}
          </a>
          <a class="button" href={href(["adapters", session.adapter], { tenant: otherTenant(session.tenant), v: String(result.version) })}>
            Open {session.adapter}
          </a>
        </div>
      </div>
    </div>
  );
}

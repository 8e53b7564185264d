import { useEffect } from "preact/hooks";

import { bytes } from "../../parts/format";
import { Icon, type IconName } from "../../parts/icon";
import { Report } from "../../parts/report";
import { Failure } from "../../parts/states";
import { href } from "../../router";
import { type FileProgress, isTerminal, type UploadJob } from "./upload-job";

const PHASES = [
  { state: "open", title: "Sending" },
  { state: "validating", title: "Checking" },
  { state: "loading", title: "Trying it" },
  { state: "ready", title: "Live" },
];

const END: Record<string, { icon: IconName; title: string }> = {
  rejected: { icon: "cross", title: "Refused" },
  failed: { icon: "warn", title: "Failed" },
  expired: { icon: "clock", title: "Expired" },
  aborted: { icon: "cross", title: "Given up" },
};

/** The way of one upload, step by step, to a state that has a name. */
export function Progress({ job, name, onAgain }: { job: UploadJob; name: string; onAgain: () => void }) {
  const session = job.session.value;
  const ended = (session !== null && isTerminal(session)) || job.error.value !== null;

  useEffect(() => {
    function warn(event: BeforeUnloadEvent): void {
      if (!ended) event.preventDefault();
    }
    window.addEventListener("beforeunload", warn);
    return () => window.removeEventListener("beforeunload", warn);
  }, [ended]);

  return (
    <>
      <div class="page-head">
        <h1 class="truncate">{name}</h1>
        {!ended && (
          <button type="button" class="button" onClick={() => job.cancel()}>
            Give up
          </button>
        )}
        {ended && (
          <button type="button" class="button" onClick={onAgain}>
            Upload another
          </button>
        )}
      </div>
      <Stepper state={session?.state ?? "open"} activate={session?.activate ?? true} />
      <div class="stack">
        {(session === null || session.state === "open") && !job.error.value && (
          <div class="panel panel-body upload-files">
            {job.progress.value.map((file) => (
              <FileBar key={file.name} file={file} />
            ))}
            {job.waiting.value ? (
              <p class="stale-note" role="status">
                <Icon name="clock" /> The connection is lost. It goes on by itself where it stopped.
              </p>
            ) : (
              <Rate job={job} />
            )}
          </div>
        )}
        {session && END[session.state] && (
          <div class="upload-end is-bad" role="alert" data-testid={`upload-${session.state}`}>
            <Icon name={END[session.state]!.icon} />
            <div>
              <h2>{END[session.state]!.title}: nothing was changed</h2>
              {session.error && <p>{session.error}</p>}
            </div>
          </div>
        )}
        {session?.state === "ready" && <Ready name={name} job={job} />}
        {job.error.value && <Failure error={job.error.value} retry={onAgain} />}
        {session?.report && <Report checks={session.report.checks} />}
      </div>
    </>
  );
}

function Stepper({ state, activate }: { state: string; activate: boolean }) {
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

function FileBar({ file }: { file: FileProgress }) {
  const sent = bytes(file.sentBytes);
  const size = bytes(file.sizeBytes);
  return (
    <div class="file-bar">
      <span class="cluster">
        <code class="truncate">{file.name}</code>
        <span class="num muted small">
          {sent.value} {sent.unit} of {size.value} {size.unit}
        </span>
      </span>
      <progress max={Math.max(1, file.sizeBytes)} value={file.sentBytes} aria-label={file.name} />
    </div>
  );
}

function Rate({ job }: { job: UploadJob }) {
  if (job.bytesPerS.value === 0) return null;
  const rate = bytes(job.bytesPerS.value);
  return (
    <p class="num muted small">
      {rate.value} {rate.unit}/s
    </p>
  );
}

function Ready({ name, job }: { name: string; job: UploadJob }) {
  const result = job.session.value?.result;
  if (!result) return null;
  return (
    <div class="upload-end is-ok" role="status" data-testid="upload-ready">
      <Icon name="check" />
      <div>
        <h2>
          {result.created
            ? `Version ${result.version} is ${job.session.value?.activate || result.version === 1 ? "live" : "ready"}`
            : `This content is version ${result.version} already`}
        </h2>
        <div class="cluster">
          <a class="button is-primary" href={href(["playground"], { columns: `,${name}@v${result.version}` })}>
            <Icon name="play" /> Try it beside the base model
          </a>
          <a class="button" href={href(["adapters", name])}>
            Open {name}
          </a>
        </div>
      </div>
    </div>
  );
}

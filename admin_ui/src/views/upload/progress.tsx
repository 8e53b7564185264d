import { bytes } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { Failure } from "../../parts/states";
import { CancelUpload } from "./cancel-upload";
import { SessionEnd, Stepper } from "./session-end";
import type { FileProgress, UploadJob } from "./upload-job";

/** The progress of one upload, step by step, to its final state. */
export function Progress({ job, onAgain }: { job: UploadJob; onAgain: () => void }) {
  const session = job.session.value;
  const ended = job.ended.value;

  async function cancel(): Promise<void> {
    await job.cancel();
    // The server has not responded yet, so there is no session whose end could be shown.
    if (job.session.value === null) onAgain();
  }

  return (
    <>
      <div class="page-head">
        <h1 class="truncate">{job.name}</h1>
        {!ended && <CancelUpload name={job.name} onConfirm={cancel} />}
        {session?.state === "failed" && (
          <button type="button" class="button is-primary" onClick={() => void job.commitAgain()}>
            Try again
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
              <p class="stale-note" role="status" data-testid="upload-waits">
                <Icon name="clock" /> Connection lost. The upload resumes automatically where it stopped.
              </p>
            ) : (
              <Rate job={job} />
            )}
          </div>
        )}
        {session && session.state !== "open" && !ended && job.waiting.value && (
          <p class="stale-note" role="status" data-testid="upload-waits">
            <Icon name="clock" /> The server is not responding. It has all the files; the upload continues automatically.
          </p>
        )}
        {job.error.value && <Failure error={job.error.value} retry={() => void job.retry()} />}
        {session && <SessionEnd session={session} />}
      </div>
    </>
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

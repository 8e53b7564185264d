import "./upload.css";

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { call } from "../../api/client";
import type { Page, UploadItem } from "../../api/types";
import { Command, Field } from "../../parts/basics";
import { cli, shellWord } from "../../parts/commands";
import { bytes } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { go, href, place } from "../../router";
import { usePolled } from "../../state/polled";
import { mayActForAll, otherTenant, shownTenant, tenantHeaders } from "../../state/session";
import { choose, type ChosenFiles, nameFrom } from "./chosen-files";
import { currentJob } from "./current-job";
import { DropZone } from "./drop-zone";
import { PastUpload } from "./past-upload";
import { PastUploads } from "./past-uploads";
import { Progress } from "./progress";
import { isTerminal, UploadJob } from "./upload-job";

const ADAPTER_NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;

/** Uploads a folder as an adapter, or shows why it was rejected. `tenant` in the URL names the owner, if it is another tenant. */
export function Upload() {
  const name = useSignal(place.value.query.get("name") ?? "");
  const activate = useSignal(true);
  const chosen = useSignal<ChosenFiles | null>(null);
  const id = place.value.segments[1];
  const tenant = (mayActForAll.value && place.value.query.get("tenant")) || shownTenant.value;
  const other = otherTenant(tenant);
  const uploads = usePolled(
    `uploads of ${tenant}`,
    async (signal) => (await call<Page<UploadItem>>("GET", "/v1/uploads?limit=20", { signal, headers: tenantHeaders(tenant) })).data.data,
    5000,
  );

  const begunId = place.value.query.get("begun");
  const begun = usePolled(
    `upload to go on with ${tenant}/${begunId}`,
    async (signal) => (begunId ? (await call<UploadItem>("GET", `/v1/uploads/${encodeURIComponent(begunId)}`, { signal, headers: tenantHeaders(tenant) })).data : null),
    0,
  );

  const asked = place.value.query.get("name");
  useEffect(() => {
    if (asked) name.value = asked;
    return () => {
      // Do not keep a name given for another tenant: in the user's own tenant it would mean a different adapter.
      if (other) name.value = "";
    };
  }, [asked, other]);

  const job = currentJob.value;
  const sent = job?.session.value ?? null;
  const runsAt = sent !== null && !isTerminal(sent) ? sent.id : null;
  useEffect(() => {
    // When the user returns to a running upload, show it at its own URL, so that its end stays visible.
    if (job && runsAt !== null && id === undefined) go(addressOf(runsAt, job), { replace: true });
  }, [runsAt, id]);

  // An ended upload is shown at its own URL; without its ID in the URL, this page is the form again.
  if (job && (id === undefined ? sent === null || !isTerminal(sent) : id === sent?.id)) {
    return (
      <Progress
        job={job}
        onAgain={() => {
          currentJob.value = null;
          chosen.value = null;
          name.value = "";
          uploads.refresh(); // to list the upload that has ended
          go(href(["upload"]));
        }}
      />
    );
  }
  if (id !== undefined) return <PastUpload key={id} id={id} tenant={tenant} />;

  function take(dropped: { file: File; path: string }[]): void {
    chosen.value = choose(dropped);
    if (!name.value) name.value = nameFrom(chosen.value.folder);
  }

  const nameProblem = name.value && !ADAPTER_NAME.test(name.value) ? "Use at most 64 letters, digits, dots, hyphens and underscores, starting with a letter or digit." : null;
  const ready = chosen.value !== null && chosen.value.problems.length === 0 && name.value !== "" && nameProblem === null;
  // The requested session may be older than those in the list.
  const known = [...(begun.data.value ? [begun.data.value] : []), ...(uploads.data.value ?? [])];
  const resumable = ready ? findResumable(known, name.value, chosen.value?.files ?? []) : null;
  const live = resumable ? resumable.activate : activate.value;

  function begin(event: Event): void {
    event.preventDefault();
    if (!ready || chosen.value === null) return;
    const started = new UploadJob(name.value, tenant, chosen.value.files);
    currentJob.value = started;
    void started.run(live, resumable);
    // Put the session in the URL, so that a reload returns to it.
    const stop = started.session.subscribe((session) => {
      if (session === null) return;
      queueMicrotask(() => stop());
      const { segments } = place.peek();
      if (segments[0] === "upload" && segments.length === 1) go(addressOf(session.id, started), { replace: true });
    });
  }

  return (
    <>
      <div class="page-head">
        <h1>Upload an adapter</h1>
        <p>An adapter is served only after it has passed every check and the engine has answered a test prompt with it.</p>
      </div>
      {other && (
        <p class="notice is-warn is-tenant" role="status" data-testid="upload-tenant">
          <Icon name="tenants" />
          <span>
            This adapter will belong to <strong>{other}</strong>. <a href={href(["upload"])}>Upload for {shownTenant.value} instead</a>
          </span>
        </p>
      )}
      <form class="upload-form" onSubmit={begin}>
        <DropZone onFiles={take} />
        {chosen.value && <Chosen files={chosen.value} />}
        <div class="upload-fields">
          <Field label="Name" hint="Requests use this as their model. An existing name gets a new version." error={nameProblem}>
            <input
              class="input mono"
              name="adapter-name"
              value={name.value}
              autocomplete="off"
              spellcheck={false}
              required
              aria-invalid={nameProblem !== null}
              onInput={(event) => (name.value = event.currentTarget.value)}
            />
          </Field>
          <label class="check">
            <input type="checkbox" checked={live} disabled={resumable !== null} onChange={(event) => (activate.value = event.currentTarget.checked)} />
            <span>
              Make it live
              <span class="muted small">
                {resumable && "As chosen when that upload was started. "}
                {live ? "Requests for the bare name get this version immediately." : "Requests must name this version to get it, unless it is the first."}
              </span>
            </span>
          </label>
        </div>
        <div class="cluster">
          <button type="submit" class="button is-primary" disabled={!ready}>
            <Icon name="upload" /> {resumable ? "Resume upload" : "Upload"}
          </button>
          {resumable && (
            <span class="muted">
              The server already has part of the files with these names and sizes, so only the rest is sent. If those were different files,{" "}
              <a href={href(["upload", resumable.id], { tenant: other })}>cancel that upload</a> first.
            </span>
          )}
        </div>
      </form>
      <section class="upload-command">
        <p class="muted">The same from a terminal:</p>
        <Command>{cli(`adapter add ${shellWord(name.value || "NAME")} ./path/to/adapter${live ? "" : " --no-activate"}`, other ?? undefined)}</Command>
      </section>
      <PastUploads uploads={uploads} of={other} />
    </>
  );
}

function addressOf(id: string, job: UploadJob): string {
  return href(["upload", id], { tenant: otherTenant(job.tenant) });
}

function Chosen({ files }: { files: ChosenFiles }) {
  return (
    <div class="chosen" data-testid="chosen-files">
      {files.files.map((file) => {
        const size = bytes(file.size);
        return (
          <p key={file.name} class="cluster">
            <Icon name="file" /> <code>{file.name}</code>
            <span class="num muted">
              {size.value} {size.unit}
            </span>
          </p>
        );
      })}
      {files.problems.map((problem) => (
        <p key={problem} class="problem" role="alert">
          <Icon name="warn" /> {problem}
        </p>
      ))}
      {files.ignored.length > 0 && (
        <p class="muted small truncate" title={files.ignored.join("\n")}>
          Ignored: {files.ignored.slice(0, 4).join(", ")}
          {files.ignored.length > 4 && ` and ${files.ignored.length - 4} more`}
        </p>
      )}
    </div>
  );
}

/** An open session for the same adapter name and files (by name and size), none of which was modified since the session began. */
function findResumable(uploads: UploadItem[], name: string, files: File[]): UploadItem | null {
  const found = uploads.find(
    (upload) =>
      upload.state === "open" &&
      upload.adapter === name &&
      upload.files.length === files.length &&
      upload.files.every((known) => files.some((file) => isSame(file, known) && file.lastModified <= 1000 * upload.created_at)),
  );
  return found && found.files.some((file) => file.offset > 0) ? found : null;
}

function isSame(file: File, known: UploadItem["files"][number]): boolean {
  return file.name === known.name && file.size === known.size_bytes;
}

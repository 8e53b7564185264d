import { call } from "../../api/client";
import type { UploadItem } from "../../api/types";
import { Amount } from "../../parts/basics";
import { ago, bytes, dateTime } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { SkeletonRows, View } from "../../parts/states";
import { toast } from "../../parts/toasts";
import { href } from "../../router";
import { usePolled } from "../../state/polled";
import { may, otherTenant, tenantHeaders } from "../../state/session";
import { CancelUpload } from "./cancel-upload";
import { SessionEnd, Stepper } from "./session-end";
import { isTerminal } from "./upload-job";

const REFRESH_MS = 2000;

/** An upload session opened by its URL: after a reload, in another tab, or someone else's. */
export function PastUpload({ id, tenant }: { id: string; tenant: string }) {
  const upload = usePolled(
    `upload ${tenant}/${id}`,
    async (signal) => (await call<UploadItem>("GET", `/v1/uploads/${encodeURIComponent(id)}`, { signal, headers: tenantHeaders(tenant) })).data,
    REFRESH_MS,
  );
  return (
    <View
      of={upload}
      whole
      skeleton={<SkeletonRows rows={4} />}
      otherwise={
        <a class="button" href={href(["upload"], { tenant: otherTenant(tenant) })}>
          All uploads
        </a>
      }
    >
      {(session) => <Session session={session} onChange={upload.refresh} />}
    </View>
  );
}

function Session({ session, onChange }: { session: UploadItem; onChange: () => void }) {
  async function act(method: "POST" | "DELETE", rest: string): Promise<void> {
    try {
      await call(method, `/v1/uploads/${session.id}${rest}`, { headers: tenantHeaders(session.tenant) });
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    }
    onChange();
  }

  const open = session.state === "open";
  const complete = open && session.files.every((file) => file.offset === file.size_bytes);
  return (
    <>
      <div class="page-head">
        <h1 class="truncate">{session.adapter}</h1>
        {may("operator") && (session.state === "failed" || complete) && (
          <button type="button" class="button is-primary" onClick={() => void act("POST", "/commit")}>
            {complete ? "Check and load" : "Try again"}
          </button>
        )}
        {may("operator") && !isTerminal(session) && (
          <CancelUpload name={session.adapter} onConfirm={() => act("DELETE", "")} />
        )}
        <a class="button" href={href(["upload"], { tenant: otherTenant(session.tenant) })}>
          All uploads
        </a>
        <p>
          Started {ago(session.created_at)} by <code>{session.by}</code>
          {open && `; kept until ${dateTime(session.expires_at)}`}.
        </p>
      </div>
      <Stepper state={session.state} activate={session.activate} />
      <div class="stack">
        {open && (
          <div class="panel panel-body upload-files">
            {session.files.map((file) => (
              <p key={file.name} class="cluster">
                <Icon name="file" /> <code>{file.name}</code>
                <span class="muted">
                  <Amount of={bytes(file.offset)} /> of <Amount of={bytes(file.size_bytes)} />
                </span>
              </p>
            ))}
            {!complete && (
              <div class="cluster">
                <a class="button is-primary" href={href(["upload"], { name: session.adapter, tenant: otherTenant(session.tenant), begun: session.id })}>
                  <Icon name="upload" /> Continue
                </a>
                <span class="muted">Choose the same files again; only the missing part is sent.</span>
              </div>
            )}
          </div>
        )}
        <SessionEnd session={session} />
      </div>
    </>
  );
}

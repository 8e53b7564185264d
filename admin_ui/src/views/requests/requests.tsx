import "./requests.css";

import { place, href } from "../../router";
import { may } from "../../state/session";
import { AuditLog } from "./audit-log";
import { RequestLog } from "./request-log";

/** What was asked of the server, and who changed what. */
export function Requests() {
  const audit = place.value.segments[1] === "audit";
  return (
    <>
      <div class="page-head">
        <h1>{audit ? "Audit" : "Requests"}</h1>
      </div>
      {may("admin") && (
        <nav class="tabs log-tabs" aria-label="Logs">
          <a class="tab" href={href(["requests"])} aria-current={audit ? undefined : "page"}>
            Requests
          </a>
          <a class="tab" href={href(["requests", "audit"])} aria-current={audit ? "page" : undefined}>
            Audit
          </a>
        </nav>
      )}
      {audit ? <AuditLog /> : <RequestLog />}
    </>
  );
}

import "./requests.css";

import { href, place } from "../../router";
import { may } from "../../state/session";
import { Usage } from "../usage/usage";
import { AuditLog } from "./audit-log";
import { RequestDetail } from "./request-detail";
import { RequestLog } from "./request-log";

const TABS = [
  { id: "", title: "Requests" },
  { id: "usage", title: "Usage" },
  { id: "audit", title: "Audit" },
];

/** The request log, usage, and the audit log. */
export function Requests() {
  const asked = place.value.segments[1] ?? "";
  const tab = TABS.find(({ id }) => id === asked);
  if (!tab) return <RequestDetail key={asked} id={asked} />;
  return (
    <>
      <div class="page-head">
        <h1>{tab.title}</h1>
      </div>
      <nav class="tabs log-tabs" aria-label="Logs">
        {TABS.filter(({ id }) => id !== "audit" || may("admin")).map(({ id, title }) => (
          <a key={id} class="tab" href={href(id ? ["requests", id] : ["requests"])} aria-current={id === asked ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      {asked === "" && <RequestLog />}
      {asked === "usage" && <Usage />}
      {asked === "audit" && <AuditLog />}
    </>
  );
}

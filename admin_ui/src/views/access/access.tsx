import "./access.css";

import { href, place } from "../../router";
import { mayActForAll, shownTenant } from "../../state/session";
import { Usage } from "../usage/usage";
import { Keys } from "./keys";
import { Tenants } from "./tenants";

/** Tenants, keys and usage. */
export function Access() {
  const asked = place.value.segments[1];
  const tab = asked === "keys" || asked === "usage" ? asked : mayActForAll.value ? "tenants" : "keys";
  const tabs = [...(mayActForAll.value ? [{ id: "tenants", title: "Tenants" }] : []), { id: "keys", title: "Keys" }, { id: "usage", title: "Usage" }];
  const query = place.value.query;
  const ofAll = tab === "tenants" || (mayActForAll.value && (query.get("by") === "tenant" || query.get("of") === "all"));
  return (
    <>
      <div class="page-head">
        <h1>
          {tabs.find(({ id }) => id === tab)?.title}
          {!ofAll && <span class="muted"> of {shownTenant.value}</span>}
        </h1>
      </div>
      <nav class="tabs log-tabs" aria-label="Access">
        {tabs.map(({ id, title }) => (
          <a key={id} class="tab" href={href(id === "tenants" ? ["access"] : ["access", id])} aria-current={id === tab ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      {tab === "tenants" && <Tenants />}
      {tab === "keys" && <Keys />}
      {tab === "usage" && <Usage />}
    </>
  );
}

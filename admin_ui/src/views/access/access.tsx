import "./access.css";

import { href, place } from "../../router";
import { mayActForAll } from "../../state/session";
import { Keys } from "./keys";
import { Tenants } from "./tenants";

/** Who may use the server, and how much of it. */
export function Access() {
  const tenants = mayActForAll.value && place.value.segments[1] !== "keys";
  return (
    <>
      <div class="page-head">
        <h1>{tenants ? "Tenants" : "Keys"}</h1>
      </div>
      {mayActForAll.value && (
        <nav class="tabs log-tabs" aria-label="Access">
          <a class="tab" href={href(["access"])} aria-current={tenants ? "page" : undefined}>
            Tenants
          </a>
          <a class="tab" href={href(["access", "keys"])} aria-current={tenants ? undefined : "page"}>
            Keys
          </a>
        </nav>
      )}
      {tenants ? <Tenants /> : <Keys />}
    </>
  );
}

import { useEffect } from "preact/hooks";

import { call } from "../api/client";
import { numTenantsChanged } from "../state/changes";
import { usePolled } from "../state/polled";
import { actFor, mayActForAll, session, shownTenant } from "../state/session";

const REFRESH_MS = 30_000;

/** For users who may act for all tenants: selects whose adapters, requests and usage are shown. */
export function TenantPicker() {
  if (session.value === null || !mayActForAll.value) {
    return session.value ? <span class="chip wide-only">{session.value.tenant}</span> : null;
  }
  return <Picker />;
}

function Picker() {
  const tenants = usePolled(
    "tenants",
    async (signal) => (await call<{ data: { id: string }[] }>("GET", "/v1/tenants?limit=500", { signal })).data.data,
    REFRESH_MS,
  );
  const numChanged = numTenantsChanged.value;
  useEffect(() => {
    if (numChanged > 0) tenants.refresh();
  }, [numChanged]);

  const ids = tenants.data.value?.map(({ id }) => id) ?? [];
  // The shown tenant may be past the end of the fetched list.
  if (!ids.includes(shownTenant.value)) ids.unshift(shownTenant.value);
  return (
    <label class="tenant-picker">
      <span class="visually-hidden">Tenant</span>
      <select class="select" value={shownTenant.value} onChange={(event) => actFor(event.currentTarget.value)}>
        {ids.map((id) => (
          <option key={id} value={id}>
            {id}
          </option>
        ))}
      </select>
    </label>
  );
}

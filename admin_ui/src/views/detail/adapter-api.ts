import { call } from "../../api/client";
import type { AdapterDetail } from "../../api/types";
import { tenantHeaders } from "../../state/session";

export function adapterPath(name: string, rest = ""): string {
  return `/v1/adapters/${encodeURIComponent(name)}${rest}`;
}

export interface Canary {
  version: number;
  weight_bp: number;
}

/** Refused if someone else changed the adapter since `adapter` was read. */
export function moveAlias(adapter: AdapterDetail, alias: string, version: number, canary: Canary | null = null): Promise<unknown> {
  return call("PUT", adapterPath(adapter.name, `/aliases/${encodeURIComponent(alias)}`), {
    headers: { ...tenantHeaders(adapter.tenant), "if-match": `"${adapter.rev}"` },
    body: { version, canary },
  });
}

/** Returns an undo that restores the alias as it is in `adapter`, whatever else changed since. */
export function restoreAlias(adapter: AdapterDetail, alias: string): () => Promise<unknown> {
  const before = adapter.aliases.find((known) => known.alias === alias);
  const path = adapterPath(adapter.name, `/aliases/${encodeURIComponent(alias)}`);
  const headers = tenantHeaders(adapter.tenant);
  if (!before) return () => call("DELETE", path, { headers });
  return () => call("PUT", path, { headers, body: { version: before.version, canary: before.canary } });
}

export function removeAlias(adapter: AdapterDetail, alias: string): Promise<unknown> {
  return call("DELETE", adapterPath(adapter.name, `/aliases/${encodeURIComponent(alias)}`), { headers: tenantHeaders(adapter.tenant) });
}

/** Refused if someone else changed the adapter since `adapter` was read: after their rollback, a second one would undo it. */
export function rollBack(adapter: AdapterDetail): Promise<unknown> {
  return call("POST", adapterPath(adapter.name, "/rollback"), {
    headers: { ...tenantHeaders(adapter.tenant), "if-match": `"${adapter.rev}"` },
    body: {},
  });
}

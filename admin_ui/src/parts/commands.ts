import { actingTenant } from "../api/client";
import { serverUrl } from "../api/server-url";
import { BUILTIN_TENANTS, mayActForAll, session } from "../state/session";

const CLI_URL = "http://127.0.0.1:8000";

/** One word of a shell's line whatever is in it, which may come from an address that somebody else made. */
export function shellWord(text: string): string {
  return /^[\w.@:/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** `loraserve …` for this server, to be pasted as it is; a key comes from LORASERVE_API_KEY. */
export function cli(words: string, tenant = actingTenant.value): string {
  const url = serverUrl === CLI_URL ? "" : ` --url ${serverUrl}`;
  return `loraserve ${words}${url}${tenant ? ` --tenant ${shellWord(tenant)}` : ""}`;
}

/**
 * Headers that curl needs. A key is named, never shown; beside a key for all tenants the tenant, which a key of that one may
 * name as well.
 */
export function curlHeaders(tenant: string | null = actingTenant.value || null): string[] {
  const key = session.value?.open ? [] : ["Authorization: Bearer $LORASERVE_API_KEY"];
  const acting = mayActForAll.value && tenant && !BUILTIN_TENANTS.includes(tenant) ? [`X-Tenant: ${tenant}`] : [];
  return ["Content-Type: application/json", ...key, ...acting];
}

/** A first request in one line. */
export function curlRequest(model: string, tenant?: string): string {
  const headers = curlHeaders(tenant).map((header) => ` -H "${header}"`).join("");
  const body = JSON.stringify({ model, prompt: "Hello", max_tokens: 16 });
  return `curl ${serverUrl}/v1/completions${headers} -d ${shellWord(body)}`;
}

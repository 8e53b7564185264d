import { actingTenant } from "../api/client";
import { serverUrl } from "../api/server-url";
import { BUILTIN_TENANTS, mayActForAll, session } from "../state/session";

const CLI_URL = "http://127.0.0.1:8000";

/** Quotes `text` as a single shell word. It may come from a URL that someone else made, so it can contain anything. */
export function shellWord(text: string): string {
  return /^[\w.@:/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** A `loraserve …` command for this server, ready to paste; the key comes from LORASERVE_API_KEY. */
export function cli(words: string, tenant = actingTenant.value): string {
  const url = serverUrl === CLI_URL ? "" : ` --url ${serverUrl}`;
  return `loraserve ${words}${url}${tenant ? ` --tenant ${shellWord(tenant)}` : ""}`;
}

/**
 * Headers that curl needs. The key is a variable, never its secret. With a key for all tenants the tenant is named too; a key of
 * that tenant may send the same header.
 */
export function curlHeaders(tenant: string | null = actingTenant.value || null): string[] {
  const key = session.value?.open ? [] : ["Authorization: Bearer $LORASERVE_API_KEY"];
  const acting = mayActForAll.value && tenant && !BUILTIN_TENANTS.includes(tenant) ? [`X-Tenant: ${tenant}`] : [];
  return ["Content-Type: application/json", ...key, ...acting];
}

/** An example request in one line. */
export function curlRequest(model: string, tenant?: string): string {
  const headers = curlHeaders(tenant).map((header) => ` -H "${header}"`).join("");
  const body = JSON.stringify({ model, prompt: "Hello", max_tokens: 16 });
  return `curl ${serverUrl}/v1/completions${headers} -d ${shellWord(body)}`;
}

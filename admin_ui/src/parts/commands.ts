import { actingTenant } from "../api/client";
import { serverUrl } from "../api/server-url";
import { DEFAULT_TENANT, session } from "../state/session";

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

/** Headers that curl needs beside the content type. A key is named, never shown; a tenant only where no key decides it. */
export function curlHeaders(tenant: string | null = actingTenant.value || null): string[] {
  const headers = ["Content-Type: application/json"];
  if (!session.value?.open) return [...headers, "Authorization: Bearer $LORASERVE_API_KEY"];
  return tenant && tenant !== DEFAULT_TENANT && tenant !== "shared" ? [...headers, `X-Tenant: ${tenant}`] : headers;
}

/** A first request in one line. */
export function curlRequest(model: string, tenant?: string): string {
  const headers = curlHeaders(tenant).map((header) => ` -H "${header}"`).join("");
  const body = JSON.stringify({ model, prompt: "Hello", max_tokens: 16 });
  return `curl ${serverUrl}/v1/completions${headers} -d ${shellWord(body)}`;
}

import { signal } from "@preact/signals";

import { kept } from "../kept";
import { serverUrl } from "./server-url";

/** An error returned by the API, or a failure to reach it at all (status 0). */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly param: string | null = null,
    readonly requestId: string | null = null,
    /** The raw body, for errors that carry more, such as a validation report. */
    readonly body: unknown = null,
  ) {
    super(message);
  }
}

export interface Answer<T> {
  data: T;
  etag: string | null;
  status: number;
  headers: Headers;
}

export interface CallOptions {
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

/** Sent with every unsafe request of a session; empty if the server is open. */
export const csrfToken = signal("");
/** The tenant that a user with rights over all tenants acts for; empty = their default. */
export const actingTenant = signal(kept(() => sessionStorage, "tenant") ?? "");
/** The tenant that this tab acted for, once the server reports that it does not (or no longer) exist. */
export const goneTenant = signal<string | null>(null);
/** False from a request that got no response until one that does. */
export const serverAnswers = signal(true);
/** Set on 401; the shell then shows the login. */
export const signedOut = signal(false);

/** Number of requests sent that may change something. */
export const numChanges = signal(0);

const SAFE = new Set(["GET", "HEAD"]);

/** Paths are relative to the server's root; requests go to this server only. */
export async function call<T>(method: string, path: string, options: CallOptions = {}): Promise<Answer<T>> {
  const response = await send(method, path, options);
  const body = parse(await heard(method, () => response.text()));
  if (!response.ok) {
    const error = errorOf(response, body);
    if (error.status === 404 && error.param === "X-Tenant" && !options.headers?.["x-tenant"]) goneTenant.value = actingTenant.peek();
    throw error;
  }
  return { data: body as T, etag: response.headers.get("etag"), status: response.status, headers: response.headers };
}

/** For streams: returns the response as soon as its headers arrive. Throws `ApiError` like `call`. */
export async function open(method: string, path: string, options: CallOptions = {}): Promise<Response> {
  const response = await send(method, path, options);
  if (!response.ok) throw errorOf(response, parse(await heard(method, () => response.text())));
  return response;
}

/** Awaits `listen`; a lost connection throws `ApiError`, even one lost after the response's headers. */
export async function heard<T>(method: string, listen: () => Promise<T>): Promise<T> {
  try {
    return await listen();
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    serverAnswers.value = false;
    const next = SAFE.has(method) ? "this page retries automatically" : "try again once it is back";
    throw new ApiError(0, "unreachable", `The server is not responding. It may be restarting; ${next}.`);
  }
}

export function requestHeaders(method: string): Record<string, string> {
  const headers: Record<string, string> = {};
  if (!SAFE.has(method) && csrfToken.value) headers["x-csrf-token"] = csrfToken.value;
  if (actingTenant.value) headers["x-tenant"] = actingTenant.value;
  return headers;
}

async function send(method: string, path: string, { body, headers, signal }: CallOptions): Promise<Response> {
  const init: RequestInit = {
    method,
    headers: { ...requestHeaders(method), ...(body === undefined ? {} : { "content-type": "application/json" }), ...headers },
    credentials: "same-origin",
    ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    ...(signal ? { signal } : {}),
  };
  const sentAs = csrfToken.peek();
  if (!SAFE.has(method)) numChanges.value++;
  const response = await heard(method, () => fetch(serverUrl + path, init));
  serverAnswers.value = true;
  // A 401 for a request sent before a login does not concern the new session.
  if (response.status === 401 && sentAs === csrfToken.peek()) signedOut.value = true;
  return response;
}

function parse(text: string): unknown {
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    return text;
  }
}

function errorOf(response: Response, body: unknown): ApiError {
  const error = (body as { error?: Partial<{ message: string; code: string; param: string | null }> } | null)?.error;
  return new ApiError(
    response.status,
    error?.code ?? `http_${response.status}`,
    error?.message ?? `The server returned HTTP ${response.status}.`,
    error?.param ?? null,
    response.headers.get("x-request-id"),
    body,
  );
}

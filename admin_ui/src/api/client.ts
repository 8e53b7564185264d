import { signal } from "@preact/signals";

import { kept } from "../kept";
import { serverUrl } from "./server-url";

/** The one error shape of the API, and failures to reach it at all (status 0). */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly param: string | null = null,
    readonly requestId: string | null = null,
    /** The body as it came, for errors that carry more, such as a validation report. */
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

/** Sent with every unsafe request of a session; empty in open mode. */
export const csrfToken = signal("");
/** The tenant that a person with rights over all of them looks at; empty = their own. */
export const actingTenant = signal(kept(() => sessionStorage, "tenant") ?? "");
/** The one that this tab acted for, once the server says that it does not exist (any more). */
export const goneTenant = signal<string | null>(null);
/** False after a request got no answer, until one does. */
export const serverAnswers = signal(true);
/** Set on 401: the shell shows the login. */
export const signedOut = signal(false);

/** Counts what was sent that may change something. */
export const numChanges = signal(0);

const SAFE = new Set(["GET", "HEAD"]);

/** Paths are relative to the server's root; everything goes to this server only. */
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

/** For streams: the response as soon as its headers are here. Throws `ApiError` like `call`. */
export async function open(method: string, path: string, options: CallOptions = {}): Promise<Response> {
  const response = await send(method, path, options);
  if (!response.ok) throw errorOf(response, parse(await heard(method, () => response.text())));
  return response;
}

/** What `listen` gets to hear of the server; a connection that is lost, be it behind the head of an answer, throws `ApiError`. */
export async function heard<T>(method: string, listen: () => Promise<T>): Promise<T> {
  try {
    return await listen();
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    serverAnswers.value = false;
    const next = SAFE.has(method) ? "this page retries by itself" : "try again once it is back";
    throw new ApiError(0, "unreachable", `The server does not answer. It may be restarting; ${next}.`);
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
  // What was sent before a login says nothing of it.
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
    error?.message ?? `The server answered ${response.status}.`,
    error?.param ?? null,
    response.headers.get("x-request-id"),
    body,
  );
}

import { computed, effect, signal } from "@preact/signals";

import { actingTenant, ApiError, call, csrfToken, goneTenant, signedOut } from "../api/client";
import { keep } from "../kept";
import { go, place } from "../router";

export type Role = "infer" | "viewer" | "operator" | "admin";

/** Response of `GET /v1/session`. */
export interface Session {
  open: boolean;
  role: Role;
  /** "*" = all tenants. */
  tenant: string;
  key_id: string | null;
  name: string;
  csrf: string;
  model: string;
  version: string;
}

export const session = signal<Session | null>(null);
export const startFailure = signal<ApiError | null>(null);
/** Why a one-time login link did not work. */
export const linkFailure = signal<string | null>(null);
/** The tenant that this tab acted for, if the server now refuses that. */
export const lostTenant = signal<string | null>(null);

const RANK: Record<Role, number> = { infer: 0, viewer: 1, operator: 2, admin: 3 };

/** Whether the user has the rights of `role`. The server decides; this only hides what it would refuse. */
export function may(role: Role): boolean {
  return session.value !== null && RANK[session.value.role] >= RANK[role];
}

export const mayActForAll = computed(() => session.value?.tenant === "*");

/** The tenant of an open server's requests, and the one that keys for all tenants act for by default. */
export const DEFAULT_TENANT = "default";

/** Tenants that every server has: one for keys that name no tenant, one for adapters that everyone may use. */
export const BUILTIN_TENANTS = [DEFAULT_TENANT, "shared"];

/** The tenant whose adapters, requests and keys are shown. */
export const shownTenant = computed(() => (mayActForAll.value ? actingTenant.value || DEFAULT_TENANT : (session.value?.tenant ?? DEFAULT_TENANT)));

/** For the URL of something that belongs to `tenant`: null if that tenant is shown anyway. */
export function otherTenant(tenant: string | null): string | null {
  return tenant === shownTenant.value ? null : tenant;
}

/** Whether the user may change what belongs to `tenant`: everyone sees the shared adapters, few may change them. */
export function mayChange(tenant: string): boolean {
  return may("operator") && (mayActForAll.value || tenant === shownTenant.value);
}

/** For a request about something that belongs to `tenant`. A key of one tenant finds its own and the shared adapters without it. */
export function tenantHeaders(tenant: string | null): Record<string, string> {
  return tenant && mayActForAll.value ? { "x-tenant": tenant } : {};
}

/** The one-time token in the fragment of a login link. */
export const linkToken = computed(() => {
  const [view, token] = place.value.segments;
  return view === "login" && token ? token : null;
});

/** Asks the server who we are. A one-time token in the fragment is used first, and removed from the address bar at once. */
export async function startSession(): Promise<void> {
  const token = linkToken.peek();
  try {
    if (token) {
      go("#/", { replace: true });
      await logIn({ token });
    } else {
      await learnSession();
    }
    startFailure.value = null;
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      if (token) linkFailure.value = error.message;
      startFailure.value = null;
      return;
    }
    startFailure.value = error instanceof ApiError ? error : new ApiError(0, "failed", String(error));
  }
}

/** All tabs share one cookie: a login in one tab applies to all, where the others may still show someone else. */
const logins = new BroadcastChannel("logins");
/** Number of logins as someone else, here or in other tabs: views then fetch again. A login with the same key keeps what is being typed. */
export const numLogins = signal(0);
logins.onmessage = async ({ data }: MessageEvent<"in" | "out">) => {
  if (data === "out") return forget();
  const wasOpen = session.peek()?.open;
  await startSession();
  if (wasOpen && !session.peek()?.open) numLogins.value += 1;
};

export async function logIn(credential: { key: string } | { token: string }): Promise<void> {
  await call("POST", "/v1/session", { body: credential });
  logins.postMessage("in");
  await learnSession();
}

/** Also ends the session on the server. */
export async function logOut(): Promise<void> {
  await call("DELETE", "/v1/session");
  logins.postMessage("out");
  forget();
}

function forget(): void {
  session.value = null;
  csrfToken.value = "";
  signedOut.value = true;
}

export function actFor(tenant: string): void {
  actingTenant.value = tenant;
  keep(() => sessionStorage, "tenant", tenant);
}

// The tenant was deleted while this tab acted for it.
effect(() => {
  const gone = goneTenant.value;
  if (!gone || gone !== actingTenant.peek()) return;
  actFor("");
  lostTenant.value = gone;
});

/** Asks who we are, for the tenant that this tab remembers; a tenant that is gone, or not accessible to this user, is forgotten. */
async function learnSession(): Promise<void> {
  const remembered = actingTenant.peek();
  try {
    accept(await askSession());
  } catch (error) {
    const isRefused = error instanceof ApiError && (error.status === 403 || error.status === 404);
    if (!remembered || !isRefused) throw error;
    actFor("");
    accept(await askSession());
    lostTenant.value = remembered;
  }
}

async function askSession(): Promise<Session> {
  return (await call<Session>("GET", "/v1/session")).data;
}

function accept(data: Session): void {
  const before = session.peek();
  if (before && !before.open && (before.key_id !== data.key_id || before.role !== data.role)) numLogins.value += 1;
  csrfToken.value = data.csrf;
  session.value = data;
  signedOut.value = false;
  if (data.tenant !== "*") actFor("");
}

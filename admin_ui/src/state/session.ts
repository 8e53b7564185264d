import { computed, effect, signal } from "@preact/signals";

import { actingTenant, ApiError, call, csrfToken, goneTenant, signedOut } from "../api/client";
import { keep } from "../kept";
import { go, place } from "../router";

export type Role = "infer" | "viewer" | "operator" | "admin";

/** `GET /v1/session`. */
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
/** Why a one-time link did not log in. */
export const linkFailure = signal<string | null>(null);
/** The tenant that this tab acted for, where the server refuses that now. */
export const lostTenant = signal<string | null>(null);

const RANK: Record<Role, number> = { infer: 0, viewer: 1, operator: 2, admin: 3 };

/** Whether the person may do what `role` may; the server decides, this only hides what it would refuse. */
export function may(role: Role): boolean {
  return session.value !== null && RANK[session.value.role] >= RANK[role];
}

export const mayActForAll = computed(() => session.value?.tenant === "*");

/** Who an open server's requests belong to, and whom keys for all tenants act for unless they say otherwise. */
export const DEFAULT_TENANT = "default";

/** For keys that name no other, and for what everybody may use: no server is without these. */
export const BUILTIN_TENANTS = [DEFAULT_TENANT, "shared"];

/** Whose adapters, requests and keys are shown. */
export const shownTenant = computed(() => (mayActForAll.value ? actingTenant.value || DEFAULT_TENANT : (session.value?.tenant ?? DEFAULT_TENANT)));

/** For the address of something of `tenant`'s: null where that is looked at anyway. */
export function otherTenant(tenant: string | null): string | null {
  return tenant === shownTenant.value ? null : tenant;
}

/** Whether the person may change what belongs to `tenant`: everybody sees the shared adapters, few may touch them. */
export function mayChange(tenant: string): boolean {
  return may("operator") && (mayActForAll.value || tenant === shownTenant.value);
}

/** For a request about something of `tenant`'s. A key of one tenant finds its own and the shared without. */
export function tenantHeaders(tenant: string | null): Record<string, string> {
  return tenant && mayActForAll.value ? { "x-tenant": tenant } : {};
}

/** The one-time token in the fragment of a link that logs in. */
export const linkToken = computed(() => {
  const [view, token] = place.value.segments;
  return view === "login" && token ? token : null;
});

/** Ask the server who we are; a one-time token in the fragment is spent first, and leaves the address bar at once. */
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

/** All tabs have one cookie: who logs in with one of them is in all of them, as somebody else than the others say. */
const logins = new BroadcastChannel("logins");
/** Counts those of somebody else, here or in other tabs: what is shown then is fetched anew. With the same key, what is being typed stays. */
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

/** Ends the session on the server, too. */
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

// Somebody deleted it while this tab acted for it.
effect(() => {
  const gone = goneTenant.value;
  if (!gone || gone !== actingTenant.peek()) return;
  actFor("");
  lostTenant.value = gone;
});

/** Who we are, for the tenant that this tab remembers: one that is gone, or not this person's, is forgotten. */
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

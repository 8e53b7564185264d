import { useComputed, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { actingTenant, serverAnswers, signedOut } from "../api/client";
import { Icon } from "../parts/icon";
import { shortcut } from "../parts/modifier-key";
import { Failure, NoPermission } from "../parts/states";
import { toast, Toasts } from "../parts/toasts";
import { href, place } from "../router";
import { linkToken, lostTenant, may, mayActForAll, numLogins, session, shownTenant, startFailure, startSession } from "../state/session";
import { theme, toggleTheme } from "../state/theme";
import { endSession } from "./end-session";
import { Jump } from "./jump";
import { LazyView } from "./lazy-view";
import { Login } from "./login";
import { MadeKey } from "./made-key";
import type { Page } from "./pages";
import { ServerDot } from "./server-dot";
import { TenantPicker } from "./tenant-picker";

const RETRY_MS = 2000;

export function Shell({ pages }: { pages: Page[] }) {
  const jumping = useSignal(false);
  const current = useComputed(() => pages.find((page) => page.segment === (place.value.segments[0] ?? "")) ?? null);

  useEffect(() => {
    void startSession();
    function onKey(event: KeyboardEvent): void {
      if (event.key.toLowerCase() === "k" && (event.metaKey || event.ctrlKey) && !signedOut.peek()) {
        event.preventDefault();
        jumping.value = true;
      }
    }
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, []);

  // Opening a login link in this tab changes only the fragment and loads nothing. The token the page was loaded with is already used.
  const link = linkToken.value;
  useEffect(() => {
    if (linkToken.peek() !== null) void startSession();
  }, [link]);

  // If the server is still starting or briefly unreachable, retry until it reports who we are.
  const failed = startFailure.value !== null;
  useEffect(() => {
    if (!failed) return;
    const timer = window.setInterval(() => void startSession(), RETRY_MS);
    return () => window.clearInterval(timer);
  }, [failed]);

  const lost = lostTenant.value;
  useEffect(() => {
    if (lost !== null) toast(`You can no longer act for tenant ${lost}. Now showing tenant ${shownTenant.value}.`);
  }, [lost]);

  // The name or ID of an adapter, request or upload comes first: browser tabs show little more.
  const title = [place.value.segments[1], current.value?.title, "loraserve"].filter(Boolean).join(" · ");
  useEffect(() => {
    document.title = title;
  }, [title]);

  // After a session that ended by itself, a login with the same key brings back what was typed.
  const goesOn = session.value !== null && !session.value.open;
  if (signedOut.value && !goesOn) return <Login />;
  if (startFailure.value) return <Failure error={startFailure.value} retry={startSession} heading="h1" />;
  if (session.value === null) return null;

  const shown = pages.filter(maySee);
  return (
    <>
      {signedOut.value && <Login />}
      <div class="shell" hidden={signedOut.value}>
        <a class="skip-link" href="#main" onClick={focusMain}>
          Skip to content
        </a>
        <nav class="rail" aria-label="Main">
          <a class="rail-brand" href="#/">
            <Mark />
            <span>loraserve</span>
          </a>
          {shown.map((page) => (
            <a
              key={page.segment}
              class={`rail-item ${page.secondary ? "is-secondary" : ""}`}
              href={href(page.segment ? [page.segment] : [])}
              aria-current={page === current.value ? "page" : undefined}
              title={page.title}
            >
              <Icon name={page.icon} />
              <span>{page.title}</span>
            </a>
          ))}
          <button type="button" class="rail-item rail-more button is-quiet" aria-haspopup="dialog" onClick={() => (jumping.value = true)}>
            <Icon name="more" />
            <span>More</span>
          </button>
          {!session.value.open && (
            <button type="button" class="rail-item rail-foot button is-quiet" onClick={endSession} title="Log out">
              <Icon name="lock" />
              <span>Log out</span>
            </button>
          )}
        </nav>
        <header class="topbar">
          <Crumbs page={current.value} />
          <TenantPicker />
          <ServerDot />
          <button type="button" class="button is-quiet" onClick={() => (jumping.value = true)}>
            <Icon name="search" />
            <span class="visually-hidden">Jump to an adapter or page</span>
            <kbd class="small muted jump-key">{shortcut("K")}</kbd>
          </button>
          <button
            type="button"
            class="button is-quiet is-icon"
            aria-label={theme.value === "dark" ? "Use the light theme" : "Use the dark theme"}
            onClick={toggleTheme}
          >
            <Icon name={theme.value === "dark" ? "sun" : "moon"} />
          </button>
        </header>
        <main class="main" id="main" tabIndex={-1}>
          {!serverAnswers.value && (
            <p class="lost-server" role="status" data-testid="lost-server">
              <Icon name="warn" /> The server is not responding. The data shown may be out of date; this page retries automatically.
            </p>
          )}
          <MadeKey />
          <CurrentView page={current.value} />
        </main>
        {jumping.value && !signedOut.value && <Jump pages={shown} onClose={() => (jumping.value = false)} />}
        <Toasts />
      </div>
    </>
  );
}

function maySee(page: Page): boolean {
  return may(page.needs) && (!page.ofServer || mayActForAll.value);
}

function CurrentView({ page }: { page: Page | null }) {
  if (page === null) return <NotFound />;
  if (!maySee(page)) return <NoPermission title={page.title} needs={page.needs} ofServer={page.ofServer} />;
  return <LazyView key={`${page.segment} ${actingTenant.value} ${numLogins.value}`} load={page.load} />;
}

/** The ID of an upload or a request, shortened in the breadcrumb. */
const GENERATED_ID = /^[0-9a-f]{32}$/;

function Crumbs({ page }: { page: Page | null }) {
  const [first, ...rest] = place.value.segments;
  if (!page || !first || rest.length === 0) return <div class="crumbs">{page?.title ?? "Not found"}</div>;
  return (
    <nav class="crumbs" aria-label="Breadcrumb">
      <a href={href([first])}>{page.title}</a>
      {rest.map((segment, index) => (
        <>
          <span aria-hidden="true">/</span>
          <span key={index} title={segment}>
            {GENERATED_ID.test(segment) ? <code>{segment.slice(0, 8)}</code> : segment}
          </span>
        </>
      ))}
    </nav>
  );
}

function NotFound() {
  return (
    <div class="state">
      <Icon name="warn" />
      <h1>Page not found</h1>
      <a class="button" href="#/">
        Go to overview
      </a>
    </div>
  );
}

function Mark() {
  return (
    <svg viewBox="0 0 20 20" fill="none" stroke="currentColor" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">
      <path d="M3 2.5v14.2h14.5" stroke-width="2.2" />
      <path d="M7 12.2 10 9l2.4 2 4.1-5.4" stroke="var(--accent)" stroke-width="2" />
    </svg>
  );
}

function focusMain(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";

import { call } from "../api/client";
import { Icon, type IconName } from "../parts/icon";
import { go, href } from "../router";
import { otherTenant, session } from "../state/session";
import { endSession } from "./end-session";
import type { Page } from "./pages";

interface Hit {
  key: string;
  title: string;
  icon: IconName;
  act: () => void;
}

function hit(title: string, icon: IconName, to: string): Hit {
  return { key: to, title, icon, act: () => go(to) };
}

/** Listed here too because the bottom bar of a small screen has no room for it. */
const LOG_OUT: Hit = { key: "log out", title: "Log out", icon: "lock", act: () => void endSession() };

const TYPING_PAUSE_MS = 120;
const MAX_ADAPTERS = 8;

/** Opened with ⌘K or Ctrl+K: type part of a page's or an adapter's name, select with the arrow keys, press Enter to go there. */
export function Jump({ pages, onClose }: { pages: Page[]; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const typed = useSignal("");
  const adapters = useSignal<{ of: string; hits: Hit[] } | null>(null);
  const chosen = useSignal(0);
  const needle = typed.value.trim().toLowerCase();
  const answer = adapters.value;
  const isAnswered = answer?.of === needle;
  const hits = [
    ...pages
      .filter((page) => page.title.toLowerCase().includes(needle))
      .map((page) => hit(page.title, page.icon, href(page.segment ? [page.segment] : []))),
    // Until the server answers for the current text, show the earlier results that still match.
    ...(answer?.hits.filter(({ title }) => isAnswered || title.toLowerCase().includes(needle)) ?? []),
    ...(!session.value?.open && "log out".includes(needle) ? [LOG_OUT] : []),
  ];

  // A layout effect, so that the dialog is open before the next keystroke: users who know the shortcut keep typing.
  useLayoutEffect(() => {
    dialog.current?.showModal();
  }, []);

  useEffect(() => {
    const aborter = new AbortController();
    const timer = window.setTimeout(async () => {
      try {
        const query = new URLSearchParams({ q: needle, limit: String(MAX_ADAPTERS) });
        const { data } = await call<{ data: { name: string; tenant: string }[] }>("GET", `/v1/adapters?${query}`, { signal: aborter.signal });
        const hits = data.data.map(({ name, tenant }) => hit(name, "adapters", href(["adapters", name], { tenant: otherTenant(tenant) })));
        adapters.value = { of: needle, hits };
      } catch {
        if (!aborter.signal.aborted) adapters.value = { of: needle, hits: [] };
      }
    }, TYPING_PAUSE_MS);
    return () => {
      window.clearTimeout(timer);
      aborter.abort();
    };
  }, [needle]);

  useEffect(() => {
    document.getElementById(`jump-hit-${chosen.value}`)?.scrollIntoView({ block: "nearest" });
  }, [chosen.value]);

  function onKey(event: KeyboardEvent): void {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step !== undefined && hits.length > 0) {
      event.preventDefault();
      chosen.value = (chosen.value + step + hits.length) % hits.length;
    } else if (event.key === "Enter") {
      event.preventDefault();
      leave(hits[chosen.value]);
    }
  }

  function leave(found: Hit | undefined): void {
    if (!found) return;
    dialog.current?.close();
    found.act();
  }

  return (
    <dialog ref={dialog} class="dialog jump" aria-label="Jump to" onClose={onClose}>
      <input
        class="input jump-input"
        role="combobox"
        aria-label="Search adapters and pages"
        aria-expanded="true"
        aria-controls="jump-hits"
        aria-activedescendant={hits.length > 0 ? `jump-hit-${chosen.value}` : undefined}
        placeholder="Search adapters and pages"
        value={typed.value}
        onInput={(event) => {
          typed.value = event.currentTarget.value;
          chosen.value = 0;
        }}
        onKeyDown={onKey}
      />
      <ul id="jump-hits" role="listbox" aria-label="Results">
        {hits.map((found, index) => (
          <li
            key={found.key}
            id={`jump-hit-${index}`}
            role="option"
            aria-selected={index === chosen.value}
            class="jump-hit"
            onClick={() => leave(found)}
          >
            <Icon name={found.icon} /> <span class="truncate">{found.title}</span>
          </li>
        ))}
      </ul>
      {isAnswered && hits.length === 0 && <p class="muted jump-none">No matching pages or adapters.</p>}
    </dialog>
  );
}

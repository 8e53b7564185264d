import { batch, type Signal, signal } from "@preact/signals";
import { useEffect, useLayoutEffect, useMemo } from "preact/hooks";

import { ApiError, call, numChanges, signedOut } from "../api/client";
import type { Page } from "../api/types";
import { onTakenBack } from "./changes";

/** A list that grows page by page while the user scrolls, and is refreshed in place. */
export interface Paged<T> {
  rows: Signal<T[] | null>;
  error: Signal<ApiError | null>;
  /** When `rows` arrived, in ms as in `Date.now()`. */
  at: Signal<number>;
  hasMore: Signal<boolean>;
  loadMore: () => void;
  refresh: () => void;
}

/** A list as it was when the user opened one of its rows: going back restores it, unless they changed something since. */
export interface LeftList<T> {
  path: string;
  rows: T[];
  at: number;
  cursor: string | null;
  scrollY: number;
  numChanges: number;
}

/** A list with more rows (the user scrolled far down) is not refreshed automatically. */
const MAX_RENEWED = 500;

/** `path` is the list with its filters; when it changes, the list starts over. `left` outlives the list. */
export function usePaged<T>(path: string, limit = 100, refreshMs = 30_000, left?: { current: LeftList<T> | null }): Paged<T> {
  const { paged, found, next } = useMemo(() => {
    const known = left?.current;
    const found = known?.path === path && known.numChanges === numChanges.peek() ? known : null;
    const rows = signal<T[] | null>(found?.rows ?? null);
    const error = signal<ApiError | null>(null);
    const at = signal(found?.at ?? 0);
    const hasMore = signal(Boolean(found?.cursor));
    return { paged: { rows, error, at, hasMore, loadMore: () => {}, refresh: () => {} }, found, next: { cursor: found?.cursor ?? null } };
  }, [path]);

  useLayoutEffect(() => {
    if (found) window.scrollTo(0, found.scrollY);
  }, []);

  useLayoutEffect(() => {
    if (!left) return;
    // When the list is removed, its replacement is already rendered and may have scrolled the page, so remember the position now.
    let scrollY = window.scrollY;
    const onScroll = () => (scrollY = window.scrollY);
    window.addEventListener("scroll", onScroll, { passive: true });
    return () => {
      const rows = paged.rows.peek();
      left.current = rows && { path, rows, at: paged.at.peek(), cursor: next.cursor, scrollY, numChanges: numChanges.peek() };
      window.removeEventListener("scroll", onScroll);
    };
  }, [paged]);

  useEffect(() => {
    const aborter = new AbortController();
    let busy = false;
    /** Whether the response under way may be older than the change that the user just made. */
    let again = false;

    async function page(at: string | null, size: number): Promise<Page<T>> {
      const separator = path.includes("?") ? "&" : "?";
      const where = `${path}${separator}limit=${size}${at ? `&cursor=${encodeURIComponent(at)}` : ""}`;
      return (await call<Page<T>>("GET", where, { signal: aborter.signal })).data;
    }

    async function load(renew: boolean): Promise<void> {
      if (busy) again ||= renew;
      if (busy || document.hidden || signedOut.peek()) return;
      busy = true;
      try {
        const known = renew ? [] : (paged.rows.peek() ?? []);
        // A refresh requests as many rows as are shown, so that the list does not shrink under the user.
        const size = renew ? Math.min(MAX_RENEWED, Math.max(limit, paged.rows.peek()?.length ?? 0)) : limit;
        const { data, next_cursor } = await page(renew ? null : next.cursor, size);
        next.cursor = next_cursor;
        batch(() => {
          paged.rows.value = [...known, ...data];
          paged.hasMore.value = next_cursor !== null;
          paged.error.value = null;
          paged.at.value = Date.now();
        });
      } catch (error) {
        if (aborter.signal.aborted) return;
        paged.error.value = error instanceof ApiError ? error : new ApiError(0, "failed", String(error));
      } finally {
        busy = false;
        if (again && !aborter.signal.aborted) {
          again = false;
          void load(true);
        }
      }
    }

    paged.loadMore = () => {
      if (paged.hasMore.peek()) void load(false);
    };
    paged.refresh = () => void load(true);
    const renewInPlace = () => {
      if ((paged.rows.peek()?.length ?? 0) <= MAX_RENEWED) void load(true);
    };
    const stopWaiting = signedOut.subscribe(renewInPlace);
    const timer = window.setInterval(renewInPlace, refreshMs);
    // A page opened in a background tab has loaded nothing yet.
    document.addEventListener("visibilitychange", renewInPlace);
    const stop = onTakenBack(paged.refresh);
    return () => {
      aborter.abort();
      stop();
      stopWaiting();
      window.clearInterval(timer);
      document.removeEventListener("visibilitychange", renewInPlace);
    };
  }, [paged]);

  return paged;
}

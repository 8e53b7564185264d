import { batch, type Signal, signal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";

import { ApiError, call } from "../api/client";
import type { Page } from "../api/types";
import { onTakenBack } from "./changes";

/** A list that grows page by page while the person scrolls, and is renewed in place. */
export interface Paged<T> {
  rows: Signal<T[] | null>;
  error: Signal<ApiError | null>;
  /** When `rows` came, in ms of `Date.now()`. */
  at: Signal<number>;
  hasMore: Signal<boolean>;
  loadMore: () => void;
  refresh: () => void;
}

/** `path` is the list with its filters; when it changes, the list begins again. */
export function usePaged<T>(path: string, limit = 100, refreshMs = 30_000): Paged<T> {
  const paged = useMemo(() => {
    const rows = signal<T[] | null>(null);
    const error = signal<ApiError | null>(null);
    const at = signal(0);
    const hasMore = signal(false);
    return { rows, error, at, hasMore, loadMore: () => {}, refresh: () => {} };
  }, [path]);

  useEffect(() => {
    const aborter = new AbortController();
    let cursor: string | null = null;
    let busy = false;
    /** Whether what is on its way may be older than the change that the person just made. */
    let again = false;

    async function page(at: string | null, size: number): Promise<Page<T>> {
      const separator = path.includes("?") ? "&" : "?";
      const where = `${path}${separator}limit=${size}${at ? `&cursor=${encodeURIComponent(at)}` : ""}`;
      return (await call<Page<T>>("GET", where, { signal: aborter.signal })).data;
    }

    async function load(renew: boolean): Promise<void> {
      if (busy) again ||= renew;
      if (busy || document.hidden) return;
      busy = true;
      try {
        const known = renew ? [] : (paged.rows.peek() ?? []);
        // Renewing asks for as many rows as are shown, so that the list does not shrink under the person.
        const size = renew ? Math.min(500, Math.max(limit, paged.rows.peek()?.length ?? 0)) : limit;
        const next = await page(renew ? null : cursor, size);
        cursor = next.next_cursor;
        batch(() => {
          paged.rows.value = [...known, ...next.data];
          paged.hasMore.value = cursor !== null;
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
    void load(true);
    const timer = window.setInterval(() => {
      // A list scrolled far down keeps still.
      if ((paged.rows.peek()?.length ?? 0) <= 500) void load(true);
    }, refreshMs);
    // A page opened in a tab behind has nothing yet.
    const onVisible = () => void load(true);
    document.addEventListener("visibilitychange", onVisible);
    const stop = onTakenBack(paged.refresh);
    return () => {
      aborter.abort();
      stop();
      window.clearInterval(timer);
      document.removeEventListener("visibilitychange", onVisible);
    };
  }, [paged]);

  return paged;
}

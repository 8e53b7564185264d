import { batch, type Signal, signal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";

import { ApiError, signedOut } from "../api/client";
import { onTakenBack } from "./changes";

/** A view's data: nothing yet, current data, or stale data together with the error that keeps it from being refreshed. */
export interface Polled<T> {
  data: Signal<T | null>;
  error: Signal<ApiError | null>;
  /** When `data` arrived, in ms as in `Date.now()`. */
  at: Signal<number>;
  /** Fetches now, for example after a change. */
  refresh: () => void;
}

const BACKGROUND_FACTOR = 5;
const RETRY_MS = 2000;

/**
 * Fetches at once, then again `intervalMs` after each response (0 = only until there is one); slower without focus, not at all while hidden.
 * `key` identifies what is fetched: when it changes, the old data is dropped and the new data fetched.
 */
export function usePolled<T>(key: string, fetcher: (signal: AbortSignal) => Promise<T>, intervalMs = 2000): Polled<T> {
  const polled = useMemo(() => {
    const data = signal<T | null>(null);
    const error = signal<ApiError | null>(null);
    const at = signal(0);
    return { data, error, at, refresh: () => {} };
  }, [key]);

  useEffect(() => {
    let timer = 0;
    let running: AbortController | null = null;
    let stopped = false;

    async function fetchOnce(): Promise<void> {
      window.clearTimeout(timer);
      if (signedOut.peek()) return;
      running?.abort();
      const mine = (running = new AbortController());
      try {
        const data = await fetcher(mine.signal);
        if (mine.signal.aborted) return;
        batch(() => {
          polled.data.value = data;
          polled.error.value = null;
          polled.at.value = Date.now();
        });
      } catch (error) {
        if (mine.signal.aborted) return;
        polled.error.value = error instanceof ApiError ? error : new ApiError(0, "failed", String(error));
      }
      // Data that is fetched only once is retried until the server responds.
      const pauseMs = intervalMs || (polled.error.value?.code === "unreachable" ? RETRY_MS : 0);
      if (!stopped && !document.hidden && pauseMs > 0) {
        timer = window.setTimeout(fetchOnce, document.hasFocus() ? pauseMs : pauseMs * BACKGROUND_FACTOR);
      }
    }

    function onVisible(): void {
      if (document.hidden) window.clearTimeout(timer);
      else void fetchOnce();
    }

    polled.refresh = () => void fetchOnce();
    document.addEventListener("visibilitychange", onVisible);
    window.addEventListener("focus", onVisible);
    const stop = onTakenBack(polled.refresh);
    const stopWaiting = signedOut.subscribe(() => void fetchOnce());
    return () => {
      stopped = true;
      stop();
      stopWaiting();
      running?.abort();
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisible);
      window.removeEventListener("focus", onVisible);
    };
  }, [polled]);

  return polled;
}

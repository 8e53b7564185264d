import { batch, type Signal, signal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";

import { ApiError, signedOut } from "../api/client";
import { onTakenBack } from "./changes";

/** What a view knows: nothing yet, data, or data that has gone stale beside the error that keeps it from being renewed. */
export interface Polled<T> {
  data: Signal<T | null>;
  error: Signal<ApiError | null>;
  /** When `data` came, in ms of `Date.now()`. */
  at: Signal<number>;
  /** Fetch now, such as after a change. */
  refresh: () => void;
}

const BACKGROUND_FACTOR = 5;
const RETRY_MS = 2000;

/**
 * Fetches at once and then again `intervalMs` after each answer, 0 = only once there is one; slower without focus, not at all while hidden.
 * `key` names what is fetched: when it changes, old data goes and the new is fetched.
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
      // What is fetched once is asked for until the server answers.
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

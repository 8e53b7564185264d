import { useSignal } from "@preact/signals";
import type { FunctionComponent } from "preact";
import { useEffect } from "preact/hooks";

import { ApiError, call, serverAnswers } from "../api/client";
import { Failure, SkeletonRows } from "../parts/states";

const RETRY_MS = 2000;

/** A view whose script is loaded when the view is first shown. */
export function LazyView({ load }: { load: () => Promise<FunctionComponent> }) {
  const view = useSignal<{ Found: FunctionComponent } | null>(null);
  const error = useSignal<ApiError | null>(null);

  useEffect(() => {
    load().then(
      (Found) => (view.value = { Found }),
      () => (error.value = new ApiError(0, "no_script", "Part of this page could not be loaded. The server may be restarting or may have been upgraded.")),
    );
  }, [load]);

  // Without a view, nothing else would notice that the server answers again.
  const isLost = error.value !== null && !serverAnswers.value;
  useEffect(() => {
    if (!isLost) return;
    const timer = window.setInterval(() => void call("GET", "/v1/session").catch(() => {}), RETRY_MS);
    return () => window.clearInterval(timer);
  }, [isLost]);

  // An upgraded server's scripts have different names, so only a reload finds them.
  if (error.value) return <Failure error={error.value} retry={() => window.location.reload()} heading="h1" />;
  if (view.value) return <view.value.Found />;
  return <SkeletonRows />;
}

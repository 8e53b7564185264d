import { useSignal } from "@preact/signals";
import type { FunctionComponent } from "preact";
import { useEffect } from "preact/hooks";

import { ApiError } from "../api/client";
import { Failure, SkeletonRows } from "../parts/states";

/** A view whose script is fetched when it is first shown. */
export function LazyView({ load }: { load: () => Promise<FunctionComponent> }) {
  const view = useSignal<{ Found: FunctionComponent } | null>(null);
  const error = useSignal<ApiError | null>(null);

  useEffect(() => {
    load().then(
      (Found) => (view.value = { Found }),
      () => (error.value = new ApiError(0, "no_script", "A part of this page could not be fetched. The server may be restarting or was upgraded.")),
    );
  }, [load]);

  // Scripts of an upgraded server have other names: only a reload finds them.
  if (error.value) return <Failure error={error.value} retry={() => window.location.reload()} heading="h1" />;
  if (view.value) return <view.value.Found />;
  return <SkeletonRows />;
}

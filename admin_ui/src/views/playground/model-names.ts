import { computed, type ReadonlySignal } from "@preact/signals";
import { useMemo } from "preact/hooks";

import { call } from "../../api/client";
import type { AdapterItem, Page } from "../../api/types";
import { usePolled } from "../../state/polled";
import { tenantHeaders } from "../../state/session";

const REFRESH_MS = 30_000;
const MAX_OFFERED = 200;

/** Suggested adapter names of `tenant` (null = the shown tenant); any other name, version or alias can be typed. */
export function useModelNames(tenant: string | null): ReadonlySignal<string[]> {
  const adapters = usePolled(
    `model names ${tenant ?? ""}`,
    async (signal) => (await call<Page<AdapterItem>>("GET", `/v1/adapters?limit=${MAX_OFFERED}&state=ready`, { signal, headers: tenantHeaders(tenant) })).data.data,
    REFRESH_MS,
  );
  return useMemo(() => computed(() => (adapters.data.value ?? []).map((adapter) => adapter.name)), [adapters]);
}

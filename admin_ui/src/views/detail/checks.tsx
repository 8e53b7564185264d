import { ApiError, call } from "../../api/client";
import type { AdapterDetail, CheckItem, ReportItem } from "../../api/types";
import { Report } from "../../parts/report";
import { SkeletonRows, View } from "../../parts/states";
import { usePolled } from "../../state/polled";
import { tenantHeaders } from "../../state/session";
import { adapterPath } from "./adapter-api";

/** Validation results of this version's content. */
export function Checks({ adapter, version }: { adapter: AdapterDetail; version: number }) {
  const path = adapterPath(adapter.name, `/versions/${version}/report`);
  const report = usePolled(
    `${adapter.tenant} ${path}`,
    async (signal): Promise<CheckItem[]> => {
      try {
        return (await call<ReportItem>("GET", path, { signal, headers: tenantHeaders(adapter.tenant) })).data.checks;
      } catch (error) {
        if (error instanceof ApiError && error.status === 404) return [];
        throw error;
      }
    },
    0,
  );
  return (
    <section>
      <h2 class="section-title">Validation checks</h2>
      <View of={report} skeleton={<SkeletonRows rows={2} />}>
        {(checks) => (checks.length === 0 ? <p class="muted">There is no validation report for this version.</p> : <Report checks={checks} />)}
      </View>
    </section>
  );
}

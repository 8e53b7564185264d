import { ApiError, call } from "../../api/client";
import type { CertificateView, VersionItem } from "../../api/types";
import { Chip } from "../../parts/basics";
import { usePolled } from "../../state/polled";
import { tenantHeaders } from "../../state/session";
import { adapterPath } from "./adapter-api";

const REFRESH_MS = 5000;
const WORDS: Record<string, string> = { pending: "Not measured yet", skipped: "Not measured" };

/** How far this version's numbers are from PEFT's own, measured once in the background of the running server. */
export function Certificate({ name, tenant, version }: { name: string; tenant: string; version: VersionItem }) {
  const certificate = usePolled(
    `${tenant}/${name}/${version.n}/certificate`,
    async (signal) => {
      try {
        const path = adapterPath(name, `/versions/${version.n}/certificate`);
        return (await call<CertificateView>("GET", path, { signal, headers: tenantHeaders(tenant) })).data;
      } catch (error) {
        if (error instanceof ApiError && error.status === 404) return null;
        throw error;
      }
    },
    REFRESH_MS,
  );
  const found = certificate.data.value;
  if (!found) return null;
  return (
    <section class="panel panel-body certificate" data-testid="certificate">
      <h2>Parity certificate</h2>
      {found.state === "done" && found.max_logit_difference !== null ? (
        <p>
          <Chip tone="ok" icon="check">
            matches PEFT
          </Chip>{" "}
          Across {found.num_tokens} positions{version.classifier ? ", the hidden states that determine its labels" : " and the whole vocabulary, log-probabilities"} differ from
          PEFT's by at most{" "}
          <span class="num strong">{found.max_logit_difference.toPrecision(2)}</span>, which rounding explains.
        </p>
      ) : (
        <p class={found.state === "failed" ? "" : "muted"}>
          {found.state === "failed" && (
            <>
              <Chip tone="bad" icon="warn">
                differs from PEFT
              </Chip>{" "}
            </>
          )}
          {found.state === "failed" ? found.reason : `${WORDS[found.state] ?? found.state}: ${found.reason ?? ""}`}
        </p>
      )}
    </section>
  );
}

import type { AdapterDetail, VersionItem } from "../../api/types";
import { Icon } from "../../parts/icon";
import { may } from "../../state/session";
import { Certificate } from "./certificate";
import { Checks } from "./checks";
import { ConfigDiff } from "./config-diff";
import { Files } from "./files";
import { VersionPanel } from "./version-panel";

/** Everything about one version: facts and aliases, certificate, files, checks, and how its configuration differs from the live one's. */
export function VersionFacts({ adapter, version, onChange }: { adapter: AdapterDetail; version: VersionItem; onChange: () => void }) {
  const live = adapter.aliases.find((alias) => alias.alias === "live");
  const differs = adapter.versions.some((known) => known.n === live?.version) && live?.version !== version.n;
  // A deleted adapter keeps its history, but its files are not served.
  const kept = adapter.status !== "deleted";
  return (
    <div class="stack">
      {!version.fits && (
        <p class="notice is-warn" role="status">
          <Icon name="warn" /> Made for {version.bases.join(", ") || "another base model"}, which this server does not serve: requests for it are refused.
        </p>
      )}
      {version.fits && version.chat_template_missing && (
        <p class="notice is-warn" role="status" data-testid="template-missing">
          <Icon name="warn" />
          <span>
            This server has no chat template <code>{version.chat_template}</code>, which this version names: chats with it are refused. Completions work. Start the server
            with <code class="nowrap">--adapter-chat-templates</code> <code>{version.chat_template}=FILE</code>.
          </span>
        </p>
      )}
      <div class="version-grid">
        <VersionPanel adapter={adapter} version={version} onChange={onChange} />
        {kept && (
          <div class="stack">
            <Certificate name={adapter.name} tenant={adapter.tenant} version={version} />
            {may("operator") && <Files adapter={adapter} version={version.n} />}
          </div>
        )}
      </div>
      {kept && differs && live && may("operator") && <ConfigDiff adapter={adapter} from={live.version} to={version.n} />}
      {kept && <Checks key={version.n} adapter={adapter} version={version.n} />}
    </div>
  );
}

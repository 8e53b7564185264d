import { useLayoutEffect, useRef } from "preact/hooks";

import type { AdapterDetail, AliasItem, VersionItem } from "../../api/types";
import { ago } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { setQuery } from "../../router";

/** Versions as dots, oldest first, with aliases as flags above them; a canary splits its alias between two versions. */
export function VersionLane({ adapter, chosen }: { adapter: AdapterDetail; chosen: number | null }) {
  const lane = useRef<HTMLElement>(null);
  const versions = [...adapter.versions].reverse();

  useLayoutEffect(() => {
    if (lane.current) showChosen(lane.current);
  }, [chosen]);

  if (versions.length === 0) return null;
  return (
    <section ref={lane} class="lane panel" aria-label="Versions">
      <ol class="lane-dots">
        {versions.map((version) => (
          <Stop key={version.n} version={version} adapter={adapter} chosen={version.n === chosen} />
        ))}
      </ol>
    </section>
  );
}

/** Scrolls the chosen version to the middle, unless all of it is in sight: a clicked one stays under the pointer. */
function showChosen(lane: HTMLElement): void {
  const stop = lane.querySelector(".is-chosen")?.getBoundingClientRect();
  const seen = lane.getBoundingClientRect();
  if (!stop || (stop.left >= seen.left && stop.right <= seen.right)) return;
  lane.scrollLeft += (stop.left + stop.right - seen.left - seen.right) / 2;
}

function Stop({ version, adapter, chosen }: { version: VersionItem; adapter: AdapterDetail; chosen: boolean }) {
  const flags = adapter.aliases.filter((alias) => alias.version === version.n);
  const canaries = adapter.aliases.filter((alias) => alias.canary?.version === version.n);
  const live = flags.some((alias) => alias.alias === "live");
  return (
    <li class={`lane-stop ${live ? "is-live" : ""} ${chosen ? "is-chosen" : ""}`}>
      <div class="lane-flags">
        {flags.map((alias) => (
          <Flag key={alias.alias} alias={alias} />
        ))}
        {canaries.map((alias) => (
          <span key={`canary ${alias.alias}`} class="flag is-canary" title={`${share(alias)} of users of ${alias.alias} get this version`}>
            {share(alias)} of {alias.alias}
          </span>
        ))}
      </div>
      <button
        type="button"
        class="lane-dot"
        aria-pressed={chosen}
        aria-label={`Version ${version.n}${live ? ", live" : ""}`}
        data-testid={`version-${version.n}`}
        onClick={() => setQuery({ v: String(version.n), tab: null })}
      >
        <span aria-hidden="true" />
      </button>
      <span class="lane-label num">v{version.n}</span>
      <span class="lane-when muted small">{ago(version.created_at)}</span>
    </li>
  );
}

function Flag({ alias }: { alias: AliasItem }) {
  return (
    <span class={`flag ${alias.alias === "live" ? "is-live" : ""}`} data-testid={`flag-${alias.alias}`}>
      {alias.alias === "live" && <Icon name="flag" />}
      {alias.alias}
      {alias.canary && <span class="flag-split">{100 - alias.canary.weight_bp / 100}%</span>}
    </span>
  );
}

function share(alias: AliasItem): string {
  return `${(alias.canary?.weight_bp ?? 0) / 100}%`;
}

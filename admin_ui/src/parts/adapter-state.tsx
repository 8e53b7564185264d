import { Chip, type Tone } from "./basics";
import { Icon, type IconName } from "./icon";

const STATUS: Record<string, { tone: Tone; icon: IconName }> = {
  ready: { tone: "ok", icon: "check" },
  disabled: { tone: "neutral", icon: "lock" },
  empty: { tone: "neutral", icon: "info" },
  other_base: { tone: "warn", icon: "warn" },
  draining: { tone: "warn", icon: "clock" },
  deleted: { tone: "bad", icon: "trash" },
};

const WORDS: Record<string, string> = { other_base: "other base" };

export function StatusChip({ status }: { status: string }) {
  const { tone, icon } = STATUS[status] ?? { tone: "neutral" as Tone, icon: "info" as IconName };
  return (
    <Chip tone={tone} icon={icon}>
      {WORDS[status] ?? status}
    </Chip>
  );
}

const TIERS = ["disk", "host", "device"];
const TIER_TITLES: Record<string, string> = {
  disk: "On disk: the first request loads it",
  host: "In host memory, mapped by the engine",
  device: "In the engine's adapter memory",
};

/** How close the adapter's bytes are to the model: three bars, filled from the left. */
export function TierMark({ tier, pinned = false }: { tier: string; pinned?: boolean }) {
  const level = TIERS.indexOf(tier);
  return (
    <span class="tier" title={TIER_TITLES[tier]}>
      <span class="tier-bars" aria-hidden="true">
        {TIERS.map((name, index) => (
          <span key={name} class={index <= level ? "is-filled" : ""} />
        ))}
      </span>
      {tier}
      {pinned && <Icon name="pin" />}
      {pinned && <span class="visually-hidden">pinned</span>}
    </span>
  );
}

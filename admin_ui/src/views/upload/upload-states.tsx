import type { Tone } from "../../parts/basics";
import type { IconName } from "../../parts/icon";

/** The chip's color and icon for each state of an upload. */
export const MARK: Record<string, { tone: Tone; icon: IconName }> = {
  open: { tone: "accent", icon: "upload" },
  validating: { tone: "accent", icon: "clock" },
  loading: { tone: "accent", icon: "clock" },
  ready: { tone: "ok", icon: "check" },
  rejected: { tone: "bad", icon: "cross" },
  failed: { tone: "bad", icon: "warn" },
  expired: { tone: "neutral", icon: "clock" },
  aborted: { tone: "neutral", icon: "cross" },
};

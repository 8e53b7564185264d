import type { RequestItem } from "../../api/types";
import { Chip, type Tone } from "../../parts/basics";
import type { IconName } from "../../parts/icon";

export const STATES = ["running", "stop", "length", "abort", "error", "lost"];

const MARK: Record<string, { tone: Tone; icon: IconName }> = {
  running: { tone: "accent", icon: "play" },
  stop: { tone: "ok", icon: "check" },
  length: { tone: "ok", icon: "check" },
  abort: { tone: "neutral", icon: "stop" },
  error: { tone: "bad", icon: "cross" },
  lost: { tone: "bad", icon: "warn" },
};
const WORDS: Record<string, string> = {
  running: "It runs now",
  stop: "The model ended it, or a stop string did",
  length: "It reached its limit of tokens",
  abort: "The client, an operator or a revocation ended it",
  error: "It failed",
  lost: "Its server was killed; it is not billed",
};

export function RequestState({ request }: { request: RequestItem }) {
  const mark = MARK[request.state] ?? { tone: "neutral" as Tone, icon: "info" as IconName };
  return (
    <span title={WORDS[request.state]}>
      <Chip tone={mark.tone} icon={mark.icon}>
        {(request.error ?? request.state).replaceAll("_", " ")}
      </Chip>
    </span>
  );
}

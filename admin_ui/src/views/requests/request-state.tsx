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
  running: "Running now",
  stop: "Ended by the model or a stop string",
  length: "Reached its token limit",
  abort: "Ended by the client, an operator or a revocation",
  error: "Failed",
  lost: "Its server was killed; not billed",
};

export function RequestState({ request }: { request: RequestItem }) {
  const mark = MARK[request.state] ?? { tone: "neutral" as Tone, icon: "info" as IconName };
  const shown = (request.error ?? request.state).replaceAll("_", " ");
  return (
    <span title={request.error ? `${WORDS[request.state]}: ${shown}` : WORDS[request.state]}>
      <Chip tone={mark.tone} icon={mark.icon}>
        <span class="truncate">{shown}</span>
      </Chip>
    </span>
  );
}

import { serverAnswers } from "../api/client";
import { Chip } from "../parts/basics";
import { session } from "../state/session";

/** Whether the server responds, and with which role; explains what an open server means. */
export function ServerDot() {
  if (!serverAnswers.value) {
    return (
      <Chip tone="bad" icon="warn">
        Not responding
      </Chip>
    );
  }
  if (session.value?.open) {
    return (
      <span title="This server requires no key: anyone on this machine is an admin. Create an admin key to change that.">
        <Chip tone="warn" icon="warn">
          <span>
            Open<span class="wide-only">: anyone on this machine is an admin</span>
          </span>
        </Chip>
      </span>
    );
  }
  return (
    <Chip tone="ok" icon="check">
      {session.value?.role}
    </Chip>
  );
}

import { useEffect, useRef } from "preact/hooks";

import { signedOut } from "../api/client";
import { CopyButton } from "../parts/basics";
import { Icon } from "../parts/icon";
import { madeKey } from "../state/made-key";

/** The one time that a secret is shown. */
export function MadeKey() {
  const place = useRef<HTMLDivElement>(null);
  const secret = madeKey.value?.secret;

  // It stands above a list in which a key far below may have been rotated.
  useEffect(() => {
    place.current?.scrollIntoView({ block: "center" });
  }, [secret]);

  if (!secret) return null;
  return (
    <div ref={place} class="panel secret" role="status" data-testid="secret">
      <Icon name="key" />
      <div>
        <p class="strong">Copy this key now: it cannot be shown again.</p>
        <div class="command">
          <code tabIndex={0}>{secret}</code>
          <CopyButton text={secret} label="Copy the key" />
        </div>
        {signedOut.value && <p class="muted small">It is the server's first: from now on every request needs a key, and so does this page.</p>}
      </div>
      <button type="button" class="button" onClick={() => (madeKey.value = null)}>
        Done
      </button>
    </div>
  );
}

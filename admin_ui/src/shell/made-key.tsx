import { useEffect, useRef } from "preact/hooks";

import { signedOut } from "../api/client";
import { CopyButton } from "../parts/basics";
import { Icon } from "../parts/icon";
import { madeKey } from "../state/made-key";

/** Shows a new secret, once. */
export function MadeKey() {
  const place = useRef<HTMLDivElement>(null);
  const secret = madeKey.value?.secret;

  // The secret appears above the list, and the rotated key may be far down in it.
  useEffect(() => {
    place.current?.scrollIntoView({ block: "center" });
  }, [secret]);

  if (!secret) return null;
  return (
    <div ref={place} class="panel secret" role="status" data-testid="secret">
      <Icon name="key" />
      <div>
        <p class="strong">Copy this key now. It cannot be shown again.</p>
        <div class="command">
          <code tabIndex={0}>{secret}</code>
          <CopyButton text={secret} label="Copy the key" />
        </div>
        {signedOut.value && <p class="muted small">This is the server's first key. From now on every request needs a key, and so does this page.</p>}
      </div>
      <button type="button" class="button" onClick={() => (madeKey.value = null)}>
        Done
      </button>
    </div>
  );
}

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

import { ApiError } from "../api/client";
import { Command, Field } from "../parts/basics";
import { cli } from "../parts/commands";
import { Toasts } from "../parts/toasts";
import { madeKey } from "../state/made-key";
import { linkFailure, logIn, session } from "../state/session";
import { MadeKey } from "./made-key";

/** Asks for a key once. The server keeps a session behind an HttpOnly cookie; this page stores nothing. */
export function Login() {
  const key = useSignal("");
  const busy = useSignal(false);
  const failure = useSignal<string | null>(null);
  const input = useRef<HTMLInputElement>(null);
  const hasEnded = session.value !== null;

  // The element that had the focus is hidden now. An open dialog closes first: nothing outside it could take the focus.
  useEffect(() => {
    if (hasEnded) queueMicrotask(() => input.current?.focus());
  }, []);

  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    busy.value = true;
    failure.value = null;
    linkFailure.value = null;
    try {
      await logIn({ key: key.value.trim() });
    } catch (error) {
      failure.value = error instanceof ApiError ? error.message : String(error);
    } finally {
      busy.value = false;
      key.value = "";
    }
  }

  return (
    <main class="login">
      <MadeKey />
      <form class="panel login-card" onSubmit={submit}>
        <h1>Log in to loraserve</h1>
        {hasEnded && <p role="status">Your session has ended. Log in with the same key to continue where you left off.</p>}
        <Field label="API key" hint="A key with the viewer, operator or admin role." error={failure.value ?? linkFailure.value}>
          <input
            ref={input}
            class="input mono"
            type="password"
            name="key"
            autocomplete="off"
            required
            placeholder="ls-…"
            value={key.value}
            onInput={(event) => (key.value = event.currentTarget.value)}
          />
        </Field>
        <button type="submit" class="button is-primary" disabled={busy.value || key.value.trim() === ""}>
          Log in
        </button>
        <div class="login-other">
          <p class="muted small">Or create a one-time login link on the server:</p>
          <Command>{cli("ui login", "")}</Command>
        </div>
      </form>
      {/* Copying the key may fail, which a toast reports. */}
      {madeKey.value && <Toasts />}
    </main>
  );
}

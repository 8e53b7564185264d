import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

import { ApiError, signedOut } from "../api/client";
import { Field } from "./basics";

interface DialogProps {
  title: string;
  children?: ComponentChildren;
  confirm: string;
  /** Label of the other button, if "Cancel" could be mistaken for the action itself. */
  dismiss?: string;
  danger?: boolean;
  /** Shown while `onConfirm` runs, if that may take seconds. */
  progress?: string;
  /** The name to type before the button is enabled, for destructive actions. */
  typeToConfirm?: string;
  onClose: () => void;
  /** The dialog closes when this resolves; if it throws, the dialog stays open and shows the error. */
  onConfirm: () => Promise<unknown>;
}

/** Modal: the browser keeps the focus inside, Escape closes it, and the focus returns to where it was. */
export function Dialog(props: DialogProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const headingId = useId();
  const typed = useSignal("");
  const busy = useSignal(false);
  const failure = useSignal<string | null>(null);
  const blocked = busy.value || (props.typeToConfirm !== undefined && inSight(typed.value) !== inSight(props.typeToConfirm));

  // If the user has to log in again, the dialog hides for the login and keeps what was typed.
  const away = signedOut.value;
  useEffect(() => {
    if (away) return dialog.current?.close();
    failure.value = null;
    dialog.current?.showModal();
  }, [away]);

  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    if (blocked) return;
    busy.value = true;
    failure.value = null;
    try {
      await props.onConfirm();
      dialog.current?.close();
    } catch (error) {
      failure.value = messageOf(error);
    } finally {
      busy.value = false;
    }
  }

  return (
    <dialog ref={dialog} class="dialog" aria-labelledby={headingId} onClose={() => signedOut.peek() || props.onClose()}>
      <form onSubmit={submit}>
        <h2 id={headingId}>{props.title}</h2>
        {props.children}
        {props.typeToConfirm !== undefined && (
          <Field label={`Type ${props.typeToConfirm} to confirm`}>
            <input
              class="input"
              value={typed.value}
              autocomplete="off"
              spellcheck={false}
              onInput={(event) => {
                typed.value = event.currentTarget.value;
              }}
            />
          </Field>
        )}
        {busy.value && props.progress && (
          <p class="muted" role="status">
            {props.progress}
          </p>
        )}
        {failure.value && (
          <p class="field-error" role="alert" style={{ color: "var(--bad)" }}>
            {failure.value}
          </p>
        )}
        <div class="dialog-actions">
          <button type="button" class="button" onClick={() => dialog.current?.close()}>
            {props.dismiss ?? "Cancel"}
          </button>
          <button type="submit" class={`button ${props.danger ? "is-danger" : "is-primary"}`} disabled={blocked}>
            {props.confirm}
          </button>
        </div>
      </form>
    </dialog>
  );
}

/** Trims and collapses spaces, which a user cannot see in a name. */
function inSight(text: string): string {
  return text.trim().replaceAll(/\s+/g, " ");
}

function messageOf(error: unknown): string {
  if (!(error instanceof ApiError)) return String(error);
  if (error.status === 412) return "Someone else changed this after you opened it, so your change was not applied. Close this dialog, review the current state, and try again.";
  return error.message;
}

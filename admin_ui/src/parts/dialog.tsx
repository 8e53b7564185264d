import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

import { ApiError, signedOut } from "../api/client";
import { Field } from "./basics";

interface DialogProps {
  title: string;
  children?: ComponentChildren;
  confirm: string;
  /** The other button, where "Cancel" could be taken for the act itself. */
  dismiss?: string;
  danger?: boolean;
  /** What goes on while `onConfirm` works, where that may take seconds. */
  progress?: string;
  /** The name to type before the button works, for what cannot be undone. */
  typeToConfirm?: string;
  onClose: () => void;
  /** The dialog closes when this is done and stays open, with the error, when it throws. */
  onConfirm: () => Promise<unknown>;
}

/** Modal: the browser keeps the focus inside, Escape closes, focus goes back to where it was. */
export function Dialog(props: DialogProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const headingId = useId();
  const typed = useSignal("");
  const busy = useSignal(false);
  const failure = useSignal<string | null>(null);
  const blocked = busy.value || (props.typeToConfirm !== undefined && inSight(typed.value) !== inSight(props.typeToConfirm));

  // While somebody has to log in again it makes way for that, with all that was typed.
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

/** Spaces at an end, or several in a row, are nothing that a person sees in a name. */
function inSight(text: string): string {
  return text.trim().replaceAll(/\s+/g, " ");
}

function messageOf(error: unknown): string {
  if (!(error instanceof ApiError)) return String(error);
  if (error.status === 412) return "Somebody else changed this after you opened it, so nothing was done. Close this, look at what is there now, and decide again.";
  return error.message;
}

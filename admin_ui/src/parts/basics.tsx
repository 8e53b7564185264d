import { useSignal } from "@preact/signals";
import { cloneElement, type ComponentChildren, type VNode } from "preact";
import { useId } from "preact/hooks";

import { copyText } from "./clipboard";
import type { Quantity } from "./format";
import { Icon, type IconName } from "./icon";
import { toast } from "./toasts";

export type Tone = "ok" | "warn" | "bad" | "accent" | "neutral";

/** A state as color, icon and word, so that it never depends on color alone. */
export function Chip({ tone = "neutral", icon, children }: { tone?: Tone; icon?: IconName; children: ComponentChildren }) {
  return (
    <span class={`chip is-${tone}`}>
      {icon && <Icon name={icon} />}
      {children}
    </span>
  );
}

export function Amount({ of }: { of: Quantity | null | undefined }) {
  if (!of) return <span class="muted">–</span>;
  return (
    <span class="num">
      {of.value}
      {of.unit && <span class="unit">{of.unit}</span>}
    </span>
  );
}

export function CopyButton({ text, label = "Copy" }: { text: string; label?: string }) {
  const copied = useSignal(false);
  async function copy(): Promise<void> {
    try {
      await copyText(text);
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
      return;
    }
    copied.value = true;
    window.setTimeout(() => {
      copied.value = false;
    }, 1500);
  }
  return (
    <button type="button" class="button is-quiet is-icon" aria-label={copied.value ? "Copied" : label} title={label} onClick={copy}>
      <Icon name={copied.value ? "check" : "copy"} />
    </button>
  );
}

/** The first 8 characters of an ID, with a button that copies all of it. */
export function Id({ value }: { value: string }) {
  return (
    <span class="cluster" style={{ gap: "2px", flexWrap: "nowrap" }}>
      <code title={value}>{value.slice(0, 8)}</code>
      <CopyButton text={value} label="Copy the full ID" />
    </span>
  );
}

export function Command({ children }: { children: string }) {
  return (
    <div class="command">
      <code tabIndex={0}>{children}</code>
      <CopyButton text={children} label="Copy the command" />
    </div>
  );
}

interface FieldProps {
  label: string;
  hint?: ComponentChildren;
  error?: string | null;
  /** The input, select or textarea. */
  children: VNode<{ "aria-describedby"?: string }>;
}

/** A control with its label. Hint and error are its accessible description, not part of its name. */
export function Field({ label, hint, error, children }: FieldProps) {
  const id = useId();
  const described = Boolean(hint || error);
  return (
    <div class="field">
      <label>
        <span class="field-label">{label}</span>
        {described ? cloneElement(children, { "aria-describedby": id }) : children}
      </label>
      {described && (
        <div id={id} class="field-notes">
          {hint && <span class="field-hint">{hint}</span>}
          {error && (
            <span class="field-error" role="alert">
              {error}
            </span>
          )}
        </div>
      )}
    </div>
  );
}

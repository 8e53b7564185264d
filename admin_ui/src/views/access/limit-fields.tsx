import type { Signal } from "@preact/signals";

import type { KeyItem } from "../../api/types";
import { Field } from "../../parts/basics";

export type Limits = KeyItem["limits"];

const LABELS: { name: keyof Limits; label: string; tenantOnly?: boolean }[] = [
  { name: "requests_per_min", label: "Requests per minute" },
  { name: "tokens_per_min", label: "Tokens per minute" },
  { name: "max_concurrent", label: "Requests at a time" },
  { name: "max_queued", label: "Sequences waiting" },
  { name: "max_adapters", label: "Adapters", tenantOnly: true },
  { name: "max_adapter_bytes", label: "Adapter bytes", tenantOnly: true },
];

/** Empty = no limit; 0 refuses everything. */
export function LimitFields({ limits, tenant = false }: { limits: Signal<Limits>; tenant?: boolean }) {
  return (
    <div class="limit-fields">
      {LABELS.filter((field) => tenant || !field.tenantOnly).map(({ name, label }) => (
        <Field key={name} label={label}>
          <input
            class="input num"
            type="number"
            min={0}
            step={1}
            placeholder="no limit"
            value={limits.value[name] ?? ""}
            onInput={(event) => {
              const text = event.currentTarget.value;
              limits.value = { ...limits.value, [name]: text === "" ? null : Math.max(0, Math.floor(Number(text))) };
            }}
          />
        </Field>
      ))}
    </div>
  );
}

export const NO_LIMITS = "none";

export function limitsText(limits: Limits): string {
  const set = LABELS.filter(({ name }) => limits[name] != null).map(({ name, label }) => `${limits[name]} ${label.toLowerCase()}`);
  return set.join(", ") || NO_LIMITS;
}

import type { Signal } from "@preact/signals";

import type { KeyItem } from "../../api/types";
import { Field } from "../../parts/basics";
import { bytes } from "../../parts/format";

export type Limits = KeyItem["limits"];

const ADAPTER_BYTES = "max_adapter_bytes";

const LABELS: { name: keyof Limits; label: string; one: string; tenantOnly?: boolean }[] = [
  { name: "requests_per_min", label: "Requests per minute", one: "request per minute" },
  { name: "tokens_per_min", label: "Tokens per minute", one: "token per minute" },
  { name: "max_concurrent", label: "Concurrent requests", one: "concurrent request" },
  { name: "max_queued", label: "Waiting sequences", one: "waiting sequence" },
  { name: "max_adapters", label: "Adapters", one: "adapter", tenantOnly: true },
  { name: ADAPTER_BYTES, label: "Adapter bytes", one: "of adapters", tenantOnly: true },
];
const NUMBER = new Intl.NumberFormat("en");

/** Empty = no limit; 0 refuses every request (for waiting sequences: only those that would have to wait). */
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
            placeholder="No limit"
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
  const set = LABELS.flatMap(({ name, label, one }) => {
    const limit = limits[name];
    if (limit == null) return [];
    if (name === ADAPTER_BYTES) return [`${bytes(limit).value} ${bytes(limit).unit} of adapters`];
    return [`${NUMBER.format(limit)} ${limit === 1 ? one : label.toLowerCase()}`];
  });
  return set.join(", ") || NO_LIMITS;
}

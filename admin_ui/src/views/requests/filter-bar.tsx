import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";

import { place, setQuery } from "../../router";

interface FilterBarProps {
  fields: { name: string; label: string }[];
  choices: { name: string; label: string; values: readonly (readonly [string, string])[] }[];
  /** Buttons after the filters. */
  children?: ComponentChildren;
}

/** Filters of a log, kept in the URL. */
export function FilterBar({ fields, choices, children }: FilterBarProps) {
  const query = place.value.query;
  return (
    <div class="filters">
      {fields.map(({ name, label }) => (
        <FilterField key={name} name={name} label={label} />
      ))}
      {choices.map(({ name, label, values }) => (
        <label key={name}>
          <span class="visually-hidden">{label}</span>
          <select class="select" value={query.get(name) ?? ""} onChange={(event) => setQuery({ [name]: event.currentTarget.value || null })}>
            <option value="">{label}</option>
            {values.map(([value, words]) => (
              <option key={value} value={value}>
                {words}
              </option>
            ))}
          </select>
        </label>
      ))}
      {children}
    </div>
  );
}

/** Typed text stays until it is submitted or the field is left, however often the log refreshes in between. */
function FilterField({ name, label }: { name: string; label: string }) {
  const typed = useSignal<string | null>(null);

  function ask(text: string): void {
    typed.value = null;
    setQuery({ [name]: text.trim() || null });
  }

  return (
    <label class="filter-field">
      <span class="visually-hidden">{label}</span>
      <input
        class="input"
        placeholder={label}
        value={typed.value ?? place.value.query.get(name) ?? ""}
        onInput={(event) => (typed.value = event.currentTarget.value)}
        onChange={(event) => ask(event.currentTarget.value)}
        onBlur={() => (typed.value = null)}
      />
    </label>
  );
}

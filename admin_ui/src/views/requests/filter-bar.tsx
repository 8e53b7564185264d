import type { ComponentChildren } from "preact";

import { place, setQuery } from "../../router";

interface FilterBarProps {
  fields: { name: string; label: string }[];
  choices: { name: string; label: string; values: readonly (readonly [string, string])[] }[];
  /** Buttons behind the filters. */
  children?: ComponentChildren;
}

/** Filters of a log, in the URL. */
export function FilterBar({ fields, choices, children }: FilterBarProps) {
  const query = place.value.query;
  return (
    <div class="filters">
      {fields.map(({ name, label }) => (
        <label key={name} class="filter-field">
          <span class="visually-hidden">{label}</span>
          <input class="input" placeholder={label} value={query.get(name) ?? ""} onChange={(event) => setQuery({ [name]: event.currentTarget.value.trim() || null })} />
        </label>
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

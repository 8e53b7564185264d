import { Icon } from "../../parts/icon";
import { place, setQuery } from "../../router";

interface FilterBarProps {
  fields: { name: string; label: string }[];
  choices?: { name: string; label: string; values: string[] };
  /** What the export button writes: the rows that are shown. */
  exported: unknown[];
  fileName: string;
}

/** Filters of a log, in the URL, and its rows as a file. */
export function FilterBar({ fields, choices, exported, fileName }: FilterBarProps) {
  const query = place.value.query;
  return (
    <div class="filters">
      {fields.map(({ name, label }) => (
        <label key={name} class="filter-field">
          <span class="visually-hidden">{label}</span>
          <input class="input" placeholder={label} value={query.get(name) ?? ""} onChange={(event) => setQuery({ [name]: event.currentTarget.value || null })} />
        </label>
      ))}
      {choices && (
        <label>
          <span class="visually-hidden">{choices.label}</span>
          <select class="select" value={query.get(choices.name) ?? ""} onChange={(event) => setQuery({ [choices.name]: event.currentTarget.value || null })}>
            <option value="">{choices.label}</option>
            {choices.values.map((value) => (
              <option key={value} value={value}>
                {value}
              </option>
            ))}
          </select>
        </label>
      )}
      <button type="button" class="button" disabled={exported.length === 0} onClick={() => save(exported, fileName)}>
        <Icon name="file" /> Export
      </button>
    </div>
  );
}

function save(rows: unknown[], fileName: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(rows, null, 2)], { type: "application/json" }));
  link.download = fileName;
  link.click();
  URL.revokeObjectURL(link.href);
}

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

import { Icon } from "../../parts/icon";
import { place, setQuery } from "../../router";

const STATES = ["ready", "disabled", "empty", "other_base", "draining", "deleted"];
/** Descending where that is the useful order. */
const ORDERS = [
  { sort: "", title: "Name" },
  { sort: "-requests", title: "Most requests" },
  { sort: "-last_used", title: "Recently used" },
  { sort: "-size", title: "Largest" },
];
const TYPING_PAUSE_MS = 200;

/** Search and filters are kept in the URL, so that a filtered list can be shared. */
export function Filters() {
  const query = place.value.query;
  const typed = useSignal(query.get("q") ?? "");
  const sent = useRef(typed.peek());

  // The URL can also change by other means: the Back button, or a button that clears the filters.
  const asked = query.get("q") ?? "";
  useEffect(() => {
    if (asked !== sent.current) typed.value = sent.current = asked;
  }, [asked]);

  useEffect(() => {
    const timer = window.setTimeout(() => {
      if (sent.current === typed.value) return;
      sent.current = typed.value;
      setQuery({ q: typed.value || null });
    }, TYPING_PAUSE_MS);
    return () => window.clearTimeout(timer);
  }, [typed.value]);

  return (
    <div class="filters" role="search">
      <label class="filter-search">
        <span class="visually-hidden">Search by name or description</span>
        <Icon name="search" />
        <input
          class="input"
          type="search"
          placeholder="Search by name or description"
          value={typed.value}
          onInput={(event) => (typed.value = event.currentTarget.value)}
          data-testid="adapter-search"
        />
      </label>
      <label>
        <span class="visually-hidden">Status</span>
        <select class="select" value={query.get("state") ?? ""} onChange={(event) => setQuery({ state: event.currentTarget.value || null })}>
          <option value="">Any status</option>
          {STATES.map((state) => (
            <option key={state} value={state}>
              {state.replace("_", " ")}
            </option>
          ))}
        </select>
      </label>
      <label class="narrow-only">
        <span class="visually-hidden">Sort by</span>
        <select class="select" value={query.get("sort") ?? ""} onChange={(event) => setQuery({ sort: event.currentTarget.value || null })}>
          {ORDERS.map(({ sort, title }) => (
            <option key={sort} value={sort}>
              {title}
            </option>
          ))}
        </select>
      </label>
      {query.get("tag") && (
        <button type="button" class="button" onClick={() => setQuery({ tag: null })} aria-label={`Remove the filter on tag ${query.get("tag")}`}>
          Tag: {query.get("tag")} <Icon name="cross" />
        </button>
      )}
    </div>
  );
}

import { computed, signal } from "@preact/signals";

/** The current location, such as `#/adapters/uppercase?tab=traffic`. Being a fragment, it never reaches server logs. */
export interface Place {
  /** Without the query, such as "/adapters/uppercase". */
  path: string;
  /** Decoded. */
  segments: string[];
  query: URLSearchParams;
}

const fragment = signal(window.location.hash);

window.addEventListener("hashchange", () => {
  fragment.value = window.location.hash;
});

export const place = computed<Place>(() => {
  const [path = "", query = ""] = fragment.value.replace(/^#/, "").split("?", 2);
  return {
    path: path || "/",
    segments: path.split("/").filter(Boolean).map(decodeSegment),
    query: new URLSearchParams(query),
  };
});

function decodeSegment(segment: string): string {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment;
  }
}

/** The href of a view. Segments are encoded, so names may contain any character; parameters with a null value are omitted. */
export function href(segments: string[], query: Record<string, string | null | undefined> = {}): string {
  const kept = Object.entries(query).filter((entry): entry is [string, string] => Boolean(entry[1]));
  const suffix = kept.length > 0 ? `?${new URLSearchParams(kept)}` : "";
  return `#/${segments.map(encodeURIComponent).join("/")}${suffix}`;
}

export function go(to: string, { replace = false } = {}): void {
  if (!replace) {
    window.location.hash = to;
    return;
  }
  history.replaceState(null, "", to);
  fragment.value = to;
}

/** Changes query parameters of the current view in place: typing into a filter adds no history entries. */
export function setQuery(changes: Record<string, string | null>): void {
  const { segments, query } = place.peek();
  go(href(segments, { ...Object.fromEntries(query), ...changes }), { replace: true });
}

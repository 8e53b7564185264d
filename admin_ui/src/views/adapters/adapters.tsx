import "./adapters.css";

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

import type { AdapterItem } from "../../api/types";
import { cli } from "../../parts/commands";
import { Icon } from "../../parts/icon";
import { Empty, ListView, SkeletonRows } from "../../parts/states";
import { VirtualRows } from "../../parts/virtual-rows";
import { href, place, setQuery } from "../../router";
import { type LeftList, usePaged } from "../../state/paged";
import { may, mayChange } from "../../state/session";
import { Detail } from "../detail/detail";
import { AdapterRow } from "./adapter-row";
import { Filters } from "./filters";
import { SelectionBar } from "./selection-bar";

const COLUMNS: { label: string; sort?: string; right?: boolean; wide?: boolean }[] = [
  { label: "Name", sort: "name" },
  { label: "Status" },
  { label: "Tier" },
  { label: "Version", right: true },
  { label: "Rank", right: true },
  { label: "Size", sort: "size", right: true },
  { label: "Targets", wide: true },
  { label: "Requests, 24 h", sort: "requests", right: true },
  { label: "TTFT p95", right: true },
  { label: "Last used", sort: "last_used", right: true },
];
const ROW_HEIGHT = 44;
const CARD_HEIGHT = 84;
const NARROW = "(max-width: 699px)";

/** The list, or one adapter if the URL names it. */
export function Adapters() {
  const name = place.value.segments[1];
  const left = useRef<LeftList<AdapterItem>>(null);
  return name === undefined ? <AdapterList left={left} /> : <Detail key={name} name={name} />;
}

/** Any number of adapters that the user may see, searched, filtered and sorted by the server. */
function AdapterList({ left }: { left: { current: LeftList<AdapterItem> | null } }) {
  const query = place.value.query;
  const filters = new URLSearchParams();
  for (const name of ["q", "state", "tag", "sort"]) {
    const value = query.get(name);
    if (value) filters.set(name, value);
  }
  const path = `/v1/adapters${filters.size > 0 ? `?${filters}` : ""}`;
  const list = usePaged<AdapterItem>(path, undefined, undefined, left);
  const narrow = useNarrow();
  const selected = useSignal<ReadonlyMap<string, AdapterItem>>(new Map());
  const changeable = (list.rows.value ?? []).filter((adapter) => mayChange(adapter.tenant));

  function toggle(adapter: AdapterItem): void {
    const next = new Map(selected.value);
    if (!next.delete(keyOf(adapter))) next.set(keyOf(adapter), adapter);
    selected.value = next;
  }

  return (
    <>
      <div class="page-head">
        <h1>Adapters</h1>
        {may("operator") && (
          <a class="button is-primary" href={href(["upload"])}>
            <Icon name="upload" /> Upload
          </a>
        )}
      </div>
      <Filters />
      <ListView of={list} skeleton={<SkeletonRows rows={10} height={ROW_HEIGHT} />}>
        {(rows) =>
          rows.length === 0 ? (
            <NoAdapters filtered={filters.size > 0} />
          ) : (
            <div class="panel adapters">
              <table class="table">
                <caption class="visually-hidden">Adapters</caption>
                <thead>
                  <tr>
                    {may("operator") && (
                      <th class="select-cell">
                        <input
                          type="checkbox"
                          aria-label="Select all shown"
                          checked={changeable.length > 0 && changeable.every((adapter) => selected.value.has(keyOf(adapter)))}
                          onChange={(event) => (selected.value = new Map(event.currentTarget.checked ? changeable.map((adapter) => [keyOf(adapter), adapter]) : []))}
                        />
                      </th>
                    )}
                    {COLUMNS.map((column) => (
                      <HeaderCell key={column.label} {...column} />
                    ))}
                  </tr>
                </thead>
                <VirtualRows
                  rows={rows}
                  rowHeight={narrow ? CARD_HEIGHT : ROW_HEIGHT}
                  columns={COLUMNS.length + 1}
                  onNearEnd={list.loadMore}
                >
                  {(adapter) => (
                    <AdapterRow
                      key={keyOf(adapter)}
                      adapter={adapter}
                      selected={selected.value.has(keyOf(adapter))}
                      selectable={may("operator")}
                      onSelect={mayChange(adapter.tenant) ? () => toggle(adapter) : null}
                    />
                  )}
                </VirtualRows>
              </table>
            </div>
          )
        }
      </ListView>
      {selected.value.size > 0 && (
        <SelectionBar
          adapters={[...selected.value.values()]}
          onDone={() => {
            selected.value = new Map();
            list.refresh();
          }}
        />
      )}
    </>
  );
}

function HeaderCell({ label, sort, right, wide }: (typeof COLUMNS)[number]) {
  const current = place.value.query.get("sort") ?? "name";
  const classes = [right ? "right" : "", wide ? "wide-only" : ""].join(" ");
  if (!sort) return <th class={classes}>{label}</th>;
  const active = current === sort || current === `-${sort}`;
  const descending = current === `-${sort}`;
  return (
    <th class={classes} aria-sort={active ? (descending ? "descending" : "ascending") : "none"}>
      <button
        type="button"
        class={`sort-button ${active ? "is-active" : ""}`}
        onClick={() => setQuery({ sort: active && !descending ? `-${sort}` : sort === "name" || active ? sort : `-${sort}` })}
      >
        {label}
        {active && <span aria-hidden="true">{descending ? " ↓" : " ↑"}</span>}
      </button>
    </th>
  );
}

function keyOf(adapter: AdapterItem): string {
  return `${adapter.tenant}/${adapter.name}`;
}

function NoAdapters({ filtered }: { filtered: boolean }) {
  if (filtered) {
    return (
      <Empty
        icon="search"
        title="No matching adapters"
        command={cli("adapter list")}
        action={
          <button type="button" class="button" onClick={() => setQuery({ q: null, state: null, tag: null })}>
            Show all adapters
          </button>
        }
      />
    );
  }
  return (
    <Empty
      icon="adapters"
      title="No adapters yet"
      command={cli("adapter add my-adapter ./path/to/adapter")}
      action={
        may("operator") && (
          <a class="button is-primary" href={href(["upload"])}>
            Upload an adapter
          </a>
        )
      }
    >
      An adapter is a folder with adapter_config.json and adapter_model.safetensors, as PEFT saves it. Once it is uploaded, requests use its name
      as their model.
    </Empty>
  );
}

function useNarrow(): boolean {
  const media = useRef(window.matchMedia(NARROW));
  const narrow = useSignal(media.current.matches);
  useEffect(() => {
    const watched = media.current;
    function update(): void {
      narrow.value = watched.matches;
    }
    watched.addEventListener("change", update);
    return () => watched.removeEventListener("change", update);
  }, []);
  return narrow.value;
}

import "./playground.css";

import { useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";

import { Field } from "../../parts/basics";
import { Icon } from "../../parts/icon";
import { place, setQuery } from "../../router";
import { session } from "../../state/session";
import { Column } from "./column";
import { ColumnRun } from "./column-run";
import { useModelNames } from "./model-names";
import type { PlaygroundSettings } from "./request";

const MAX_COLUMNS = 4;

/** The same prompt to up to four models at once. The columns are in the URL: an empty name is the base model. */
export function Playground() {
  const columns = (place.value.query.get("columns") ?? "").split(",").slice(0, MAX_COLUMNS);
  const runs = useMemo(() => Array.from({ length: MAX_COLUMNS }, () => new ColumnRun()), []);
  const names = useModelNames();
  const differences = useSignal(false);
  const settings = useSignal<PlaygroundSettings>({
    mode: "chat",
    prompt: "",
    system: "",
    maxTokens: 128,
    temperature: 0,
    seed: 1,
  });
  const running = runs.some((run) => run.state.value === "waiting" || run.state.value === "streaming");
  const base = session.value?.model ?? "";

  useEffect(() => () => runs.forEach((run) => run.stop()), []);

  function change(changes: Partial<PlaygroundSettings>): void {
    settings.value = { ...settings.value, ...changes };
  }

  function setColumns(next: string[]): void {
    setQuery({ columns: next.join(",") });
  }

  function send(event?: Event): void {
    event?.preventDefault();
    if (settings.value.prompt.trim() === "") return;
    columns.forEach((model, index) => void runs[index]?.start(model || base, settings.value));
  }

  function remove(index: number): void {
    runs[index]?.stop();
    const [gone] = runs.splice(index, 1);
    if (gone) runs.push(gone);
    setColumns(columns.filter((_, at) => at !== index));
  }

  return (
    <>
      <div class="page-head">
        <h1>Playground</h1>
        {columns.length > 1 && (
          <label class="check is-inline">
            <input type="checkbox" checked={differences.value} onChange={(event) => (differences.value = event.currentTarget.checked)} />
            Mark what differs from the first column
          </label>
        )}
        {columns.length < MAX_COLUMNS && (
          <button type="button" class="button" onClick={() => setColumns([...columns, names.value[columns.length - 1] ?? ""])}>
            <Icon name="plus" /> Add a column
          </button>
        )}
      </div>
      <form class="playground-form panel" onSubmit={send}>
        <div class="playground-top">
          <div class="segmented" role="group" aria-label="Kind of request">
            {(["chat", "completion"] as const).map((mode) => (
              <button key={mode} type="button" aria-pressed={settings.value.mode === mode} onClick={() => change({ mode })}>
                {mode}
              </button>
            ))}
          </div>
          <NumberField label="Max tokens" value={settings.value.maxTokens} min={1} max={100_000} onChange={(maxTokens) => change({ maxTokens })} />
          <NumberField label="Temperature" value={settings.value.temperature} min={0} max={2} step={0.1} onChange={(temperature) => change({ temperature })} />
          <NumberField label="Seed" value={settings.value.seed} min={0} max={2 ** 31} onChange={(seed) => change({ seed })} />
        </div>
        {settings.value.mode === "chat" && (
          <Field label="System">
            <input class="input" value={settings.value.system} placeholder="None" onInput={(event) => change({ system: event.currentTarget.value })} />
          </Field>
        )}
        <Field label="Prompt">
          <textarea
            class="textarea"
            rows={3}
            data-testid="prompt"
            placeholder="Ask every column the same"
            value={settings.value.prompt}
            onInput={(event) => change({ prompt: event.currentTarget.value })}
            onKeyDown={(event) => {
              if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) send(event);
            }}
          />
        </Field>
        <div class="cluster">
          {/* With keys: one element that turns from Stop into Send during its click would send at once. */}
          {running ? (
            <button key="stop" type="button" class="button" onClick={() => runs.forEach((run) => run.stop())}>
              <Icon name="stop" /> Stop
            </button>
          ) : (
            <button key="send" type="submit" class="button is-primary" disabled={settings.value.prompt.trim() === ""}>
              <Icon name="play" /> Send
            </button>
          )}
          <span class="muted small">Ctrl+Enter sends</span>
        </div>
      </form>
      <div class="columns" style={{ "--columns": columns.length }}>
        {columns.map((model, index) => (
          <Column
            key={index}
            index={index}
            model={model}
            base={base}
            names={names.value}
            run={runs[index]!}
            settings={settings.value}
            compareWith={differences.value && index > 0 ? (runs[0] ?? null) : null}
            onModel={(next) => setColumns(columns.map((name, at) => (at === index ? next : name)))}
            onRemove={columns.length > 1 ? () => remove(index) : null}
          />
        ))}
      </div>
    </>
  );
}

interface NumberFieldProps {
  label: string;
  value: number;
  min: number;
  max: number;
  step?: number;
  onChange: (value: number) => void;
}

function NumberField({ label, value, min, max, step = 1, onChange }: NumberFieldProps) {
  return (
    <label class="number-field">
      <span class="muted small">{label}</span>
      <input
        class="input num"
        type="number"
        value={value}
        min={min}
        max={max}
        step={step}
        onChange={(event) => {
          const next = event.currentTarget.valueAsNumber;
          if (Number.isFinite(next)) onChange(Math.min(max, Math.max(min, next)));
        }}
      />
    </label>
  );
}

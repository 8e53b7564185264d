import "./playground.css";

import { useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";

import { Field } from "../../parts/basics";
import { Icon } from "../../parts/icon";
import { shortcut } from "../../parts/modifier-key";
import { href, place, setQuery } from "../../router";
import { mayActForAll, otherTenant, session, shownTenant } from "../../state/session";
import { answerFormat, FormatField, SchemaField, schemaProblem } from "./answer-format";
import { Column } from "./column";
import { ColumnRun } from "./column-run";
import { useModelNames } from "./model-names";
import { asksForText, documentsOf, MODES, type PlaygroundSettings } from "./request";
import { words } from "./words";

const MAX_COLUMNS = 4;

type AskedSettings = Omit<PlaygroundSettings, "prompt" | "documents" | "system" | "schema" | "tenant">;

const DEFAULTS: AskedSettings = { mode: "chat", maxTokens: 128, temperature: 0, seed: 1, format: "text" };
const MAX_TOKENS = 100_000;
const MAX_TEMPERATURE = 2;
const MAX_SEED = 2 ** 31;

/**
 * Sends the same prompt to up to four models at once. The URL holds the columns (an empty name is the base model) and the
 * numeric settings, but no typed text. `tenant` in the URL names the adapters' owner, if it is another tenant.
 */
export function Playground() {
  const columns = (place.value.query.get("columns") ?? "").split(",").slice(0, MAX_COLUMNS);
  const runs = useMemo(() => Array.from({ length: MAX_COLUMNS }, () => new ColumnRun()), []);
  const tenant = mayActForAll.value ? otherTenant(place.value.query.get("tenant")) : null;
  const names = useModelNames(tenant);
  const differences = useSignal(false);
  const settings: PlaygroundSettings = { tenant, ...askedSettings(place.value.query), ...words.value };
  const forText = asksForText(settings.mode);
  const isWhole = forText ? schemaProblem(settings) === null : settings.mode !== "rerank" || documentsOf(settings).length > 0;
  const ready = settings.prompt.trim() !== "" && isWhole;
  const running = runs.some((run) => run.state.value === "waiting" || run.state.value === "streaming");
  const base = session.value?.model ?? "";

  useEffect(() => () => runs.forEach((run) => run.stop()), []);

  function change(changes: Partial<AskedSettings>): void {
    setQuery(Object.fromEntries(Object.entries(changes).map(([name, value]) => [name, value === DEFAULTS[name as keyof AskedSettings] ? null : String(value)])));
  }

  function setColumns(next: string[]): void {
    setQuery({ columns: next.join(",") });
  }

  function send(event?: Event): void {
    event?.preventDefault();
    if (!ready) return;
    columns.forEach((model, index) => void runs[index]?.start(model || base, settings));
  }

  function sendByKey(event: KeyboardEvent): void {
    if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) send(event);
  }

  function stop(event: MouseEvent): void {
    // Ignore the second click of a double click on Send: this button took its place.
    if (event.detail < 2) runs.forEach((run) => run.stop());
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
        {columns.length > 1 && forText && (
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
      {tenant && (
        <p class="notice is-warn is-tenant" role="status" data-testid="playground-tenant">
          <Icon name="tenants" />
          <span>
            Model names refer to adapters of <strong>{tenant}</strong>. <a href={href(["playground"])}>Use those of {shownTenant.value} instead</a>
          </span>
        </p>
      )}
      <form class="playground-form panel" onSubmit={send}>
        <div class="playground-top">
          <div class="segmented" role="group" aria-label="Request type">
            {MODES.map((mode) => (
              <button key={mode} type="button" aria-pressed={settings.mode === mode} onClick={() => change({ mode })}>
                {mode}
              </button>
            ))}
          </div>
          {forText && (
            <>
              <FormatField value={settings.format} onChange={(format) => change({ format })} />
              <NumberField label="Max tokens" value={settings.maxTokens} min={1} max={MAX_TOKENS} onChange={(maxTokens) => change({ maxTokens })} />
              <NumberField label="Temperature" value={settings.temperature} min={0} max={MAX_TEMPERATURE} step={0.1} onChange={(temperature) => change({ temperature })} />
              <NumberField label="Seed" value={settings.seed} min={0} max={MAX_SEED} onChange={(seed) => change({ seed })} />
            </>
          )}
        </div>
        {settings.mode === "chat" && (
          <Field label="System prompt">
            <input class="input" value={settings.system} placeholder="None" onInput={(event) => (words.value = { ...words.value, system: event.currentTarget.value })} />
          </Field>
        )}
        <Field label={settings.mode === "rerank" ? "Query" : "Prompt"}>
          <textarea
            class="textarea"
            rows={3}
            dir="auto"
            data-testid="prompt"
            placeholder="Sent to every column"
            value={settings.prompt}
            onInput={(event) => (words.value = { ...words.value, prompt: event.currentTarget.value })}
            onKeyDown={sendByKey}
          />
        </Field>
        {settings.mode === "rerank" && (
          <Field label="Documents, one per line">
            <textarea
              class="textarea"
              rows={4}
              dir="auto"
              data-testid="documents"
              value={settings.documents}
              onInput={(event) => (words.value = { ...words.value, documents: event.currentTarget.value })}
              onKeyDown={sendByKey}
            />
          </Field>
        )}
        {forText && settings.format === "schema" && <SchemaField settings={settings} onChange={(schema) => (words.value = { ...words.value, schema })} />}
        <div class="cluster">
          {/* Keys make these two elements: a single one that turned from Stop into Send during a click would send at once. */}
          {running ? (
            <button key="stop" type="button" class="button" onClick={stop}>
              <Icon name="stop" /> Stop
            </button>
          ) : (
            <button key="send" type="submit" class="button is-primary" disabled={!ready}>
              <Icon name="play" /> Send
            </button>
          )}
          <span class="muted small">{shortcut("Enter")} to send</span>
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
            settings={settings}
            compareWith={differences.value && index > 0 ? (runs[0] ?? null) : null}
            onModel={(next) => {
              runs[index]?.clear();
              setColumns(columns.map((name, at) => (at === index ? next : name)));
            }}
            onRemove={columns.length > 1 ? () => remove(index) : null}
          />
        ))}
      </div>
    </>
  );
}

function askedSettings(query: URLSearchParams): AskedSettings {
  const number = (name: keyof AskedSettings, min: number, max: number, otherwise: number) => clamp(Number.parseFloat(query.get(name) ?? ""), min, max, otherwise);
  return {
    mode: MODES.find((mode) => mode === query.get("mode")) ?? "chat",
    maxTokens: Math.round(number("maxTokens", 1, MAX_TOKENS, DEFAULTS.maxTokens)),
    temperature: number("temperature", 0, MAX_TEMPERATURE, DEFAULTS.temperature),
    seed: Math.round(number("seed", 0, MAX_SEED, DEFAULTS.seed)),
    format: answerFormat(query.get("format")),
  };
}

function clamp(value: number, min: number, max: number, otherwise: number): number {
  return Number.isFinite(value) ? Math.min(max, Math.max(min, value)) : otherwise;
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
          const next = clamp(event.currentTarget.valueAsNumber, min, max, value);
          // Also if the value did not change: then nothing re-renders, and the field would show a value that is not sent.
          event.currentTarget.value = String(next);
          onChange(next);
        }}
      />
    </label>
  );
}

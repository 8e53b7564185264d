import { useSignal } from "@preact/signals";

import { Amount, CopyButton } from "../../parts/basics";
import { count, milliseconds } from "../../parts/format";
import { Icon } from "../../parts/icon";
import { wordDiff } from "../../parts/word-diff";
import { schemaProblem } from "./answer-format";
import type { ColumnRun, RunState } from "./column-run";
import { Labels } from "./labels";
import { Reasoning } from "./reasoning";
import { asCurl, type PlaygroundSettings } from "./request";

interface ColumnProps {
  index: number;
  model: string;
  base: string;
  names: string[];
  run: ColumnRun;
  settings: PlaygroundSettings;
  compareWith: ColumnRun | null;
  onModel: (model: string) => void;
  onRemove: (() => void) | null;
}

const WORDS: Record<RunState, string> = {
  idle: "",
  waiting: "waiting for the first token",
  streaming: "streaming",
  done: "",
  stopped: "stopped",
  failed: "",
};

export function Column({ index, model, base, names, run, settings, compareWith, onModel, onRemove }: ColumnProps) {
  const listId = `models-${index}`;
  const draft = useSignal<string | null>(null);

  function leave(): void {
    if (draft.value !== null && draft.value !== model) onModel(draft.value.replaceAll(",", "").trim());
    draft.value = null;
  }

  return (
    <section class="column panel" aria-label={`Column ${index + 1}: ${model || base}`} data-testid={`column-${index}`} data-state={run.state.value}>
      <header class="column-head">
        <input
          class="input mono"
          list={listId}
          aria-label={`Model of column ${index + 1}`}
          placeholder={`${base} (base model)`}
          value={draft.value ?? model}
          onFocus={(event) => event.currentTarget.select()}
          onInput={(event) => {
            draft.value = event.currentTarget.value;
            // Selected from the list: apply it without waiting for the field to lose focus.
            if (names.includes(event.currentTarget.value)) leave();
          }}
          onBlur={leave}
          onKeyDown={(event) => {
            if (event.key === "Enter") leave();
          }}
        />
        <datalist id={listId}>
          {names.map((name) => (
            <option key={name} value={name} />
          ))}
        </datalist>
        {schemaProblem(settings) === null && <CopyButton text={asCurl(model || base, settings)} label="Copy as curl" />}
        {onRemove && (
          <button type="button" class="button is-quiet is-icon" aria-label={`Remove column ${index + 1}`} onClick={onRemove}>
            <Icon name="cross" />
          </button>
        )}
      </header>
      <div class="column-text" aria-live="off" tabIndex={0}>
        {run.reasoning.value !== "" && <Reasoning run={run} />}
        <div class="column-answer" data-testid="answer">
          {(run.error.value === null || run.text.value !== "") && <Answer run={run} compareWith={compareWith} />}
          {run.error.value && (
            <p class="problem" role="alert">
              <Icon name="warn" />
              {run.error.value.message}
            </p>
          )}
        </div>
      </div>
      <Figures run={run} />
    </section>
  );
}

function Answer({ run, compareWith }: { run: ColumnRun; compareWith: ColumnRun | null }) {
  if (run.state.value === "idle") return <p class="muted">The answer appears here.</p>;
  if (run.classified.value) return <Labels {...run.classified.value} />;
  if (run.state.value === "done" && run.text.value === "") return <p class="muted">{whyEmpty(run)}</p>;
  if (compareWith && run.state.value === "done" && compareWith.state.value === "done") {
    return (
      <>
        {wordDiff(compareWith.text.value, run.text.value).map((piece, index) =>
          piece.differs ? <mark key={index}>{piece.text}</mark> : <span key={index}>{piece.text}</span>,
        )}
      </>
    );
  }
  return (
    <>
      {run.text.value}
      {run.state.value === "streaming" && !run.thinks.value && <span class="caret" aria-hidden="true" />}
    </>
  );
}

function whyEmpty(run: ColumnRun): string {
  if (run.reasoning.value === "") return "The answer is empty.";
  return run.finishReason.value === "length" ? "Reasoning used up all allowed tokens." : "The model stopped before it answered.";
}

function Figures({ run }: { run: ColumnRun }) {
  const usage = run.usage.value;
  return (
    <footer class="column-figures">
      <Figure label="TTFT">
        <Amount of={run.ttftMs.value === null ? null : milliseconds(run.ttftMs.value)} />
      </Figure>
      <Figure label="Tokens/s">
        <Amount of={run.tokensPerS.value === null ? null : count(Math.round(run.tokensPerS.value))} />
      </Figure>
      <Figure label="Prompt">
        <Amount of={usage && count(usage.prompt)} />
      </Figure>
      <Figure label="Cached">
        <Amount of={usage && count(usage.cached)} />
      </Figure>
      <Figure label="Output">
        <Amount of={usage && count(usage.output)} />
      </Figure>
      <span class="column-state">
        <span class="muted small" role="status">
          {run.version.value && `v${run.version.value} `}
          {stateWords(run)}
        </span>
        {run.text.value !== "" && <CopyButton text={run.text.value} label="Copy the answer" />}
      </span>
    </footer>
  );
}

function stateWords(run: ColumnRun): string {
  if (run.state.value === "done" && run.finishReason.value) return `ended: ${run.finishReason.value}`;
  return run.thinks.value ? "thinking" : WORDS[run.state.value];
}

function Figure({ label, children }: { label: string; children: preact.ComponentChildren }) {
  return (
    <span class="figure">
      <span class="muted small">{label}</span>
      {children}
    </span>
  );
}

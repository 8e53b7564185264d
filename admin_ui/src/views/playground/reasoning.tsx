import { useSignal } from "@preact/signals";

import { Amount } from "../../parts/basics";
import { count } from "../../parts/format";
import { Icon } from "../../parts/icon";
import type { ColumnRun } from "./column-run";

/** The model's reasoning: expanded until the answer begins, then collapsed, unless the user chose otherwise. */
export function Reasoning({ run }: { run: ColumnRun }) {
  const chosen = useSignal<boolean | null>(null);
  const isOpen = chosen.value ?? run.text.value === "";
  const thinks = run.thinks.value;
  const tokens = run.usage.value?.reasoning;

  function see(isOpenNow: boolean): void {
    // Also called when the element is opened or closed by the program.
    if (isOpenNow !== isOpen) chosen.value = isOpenNow;
  }

  return (
    <details class="reasoning" data-testid="reasoning" open={isOpen} onToggle={(event) => see(event.currentTarget.open)}>
      <summary>
        <Icon name="down" />
        <span>
          {thinks ? "Thinking" : "Reasoning"}
          {tokens ? (
            <>
              {" · "}
              <Amount of={count(tokens)} /> tokens
            </>
          ) : null}
        </span>
      </summary>
      <div class={thinks ? "reasoning-text is-growing" : "reasoning-text"} tabIndex={0} role="group" aria-label="Reasoning">
        <p>
          {run.reasoning.value}
          {thinks && <span class="caret" aria-hidden="true" />}
        </p>
      </div>
    </details>
  );
}

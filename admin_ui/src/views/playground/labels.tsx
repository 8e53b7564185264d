import { Amount } from "../../parts/basics";
import { percent } from "../../parts/format";
import type { Classified } from "./classify";

const MAX_SHOWN = 20;

/** Labels, largest number first; probabilities also as bars. */
export function Labels({ labels, areProbabilities }: Pick<Classified, "labels" | "areProbabilities">) {
  return (
    <>
      <ol class="labels" data-testid="labels">
        {labels.slice(0, MAX_SHOWN).map(({ name, number }, index) => (
          <li key={index}>
            <span class="truncate" dir="auto" title={name}>
              {name}
            </span>
            {areProbabilities ? <Amount of={percent(number)} /> : <span class="num">{number.toPrecision(4)}</span>}
            {areProbabilities && <span class="labels-bar" style={{ width: `${100 * number}%` }} aria-hidden="true" />}
          </li>
        ))}
      </ol>
      {labels.length > MAX_SHOWN && <p class="muted small">and {labels.length - MAX_SHOWN} more</p>}
    </>
  );
}

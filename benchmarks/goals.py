"""What is compared with what, and how: a ratio is taken within each repeat, then the median over the repeats."""

import statistics
from dataclasses import dataclass

MIN_NOISE = 0.02
"""Three repeats may agree by chance."""

Runs = dict[str, list[float]]
"""Figure → its value in every repeat."""


@dataclass(frozen=True, slots=True)
class Goal:
    work: str
    against: str
    figure: str
    reference: str
    gate: float
    stretch: float
    floor: float | None = None
    """What the bytes that must be read allow; None = no such limit."""
    smaller_is_better: bool = False


GOALS = [
    Goal("16 adapters, HTTP", "PEFT, static batches", "HTTP, 16 adapters", "PEFT, 16 adapters", 4.0, 5.5),
    Goal("16 adapters, HTTP", "vLLM, HTTP", "HTTP, 16 adapters", "vLLM, 16 adapters", 8.0, 11.0),
    Goal("base, HTTP", "vLLM, HTTP", "HTTP, base", "vLLM, base", 2.2, 3.0),
    Goal(
        "base, HTTP", "transformers `generate`, static batches", "HTTP, base", "transformers generate, base", 1.4, 1.7
    ),
    Goal("16 adapters", "own base", "HTTP, 16 adapters", "HTTP, base", 0.50, 0.60, floor=0.65),
    Goal("Zipf mix of 16 adapters", "own base", "HTTP, Zipf mix", "HTTP, base", 0.62, 0.72, floor=0.79),
    Goal("base on an engine with LoRA", "without", "HTTP, base on the LoRA engine", "HTTP, base", 0.98, 1.0, floor=1.0),
    Goal(
        "16 adapters in use of 2,000",
        "of 16",
        "HTTP, 16 adapters of 2,000",
        "HTTP, 16 adapters",
        0.97,
        0.99,
        floor=1.0,
    ),
    *(
        Goal(
            f"decode step of 16, {mix}",
            "reading its bytes",
            f"decode step ms, {mix}",
            f"byte floor ms, {mix}",
            1.6,
            1.3,
            floor=1.0,
            smaller_is_better=True,
        )
        for mix in ("base", "16 adapters")
    ),
    Goal(
        "TTFT of 1,024 tokens, cached",
        "uncached",
        "TTFT ms, 1,024 tokens cached",
        "TTFT ms, 1,024 tokens uncached",
        0.10,
        0.05,
        floor=0.02,
        smaller_is_better=True,
    ),
]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of one goal in one result."""

    goal: Goal
    repeats: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    @property
    def noise(self) -> float:
        """Spread of the repeats, as a share of the median."""
        return (max(self.repeats) - min(self.repeats)) / self.median

    @property
    def verdict(self) -> str:
        if self._reaches(self.goal.stretch):
            return "stretch"
        return "yes" if self._reaches(self.goal.gate) else "no"

    def _reaches(self, limit: float) -> bool:
        return self.median <= limit if self.goal.smaller_is_better else self.median >= limit


def ratios(runs: Runs) -> list[Ratio]:
    """Of all goals whose two figures were measured."""
    return [
        Ratio(goal, [a / b for a, b in zip(runs[goal.figure], runs[goal.reference], strict=True)])
        for goal in GOALS
        if goal.figure in runs and goal.reference in runs
    ]


@dataclass(frozen=True, slots=True)
class Change:
    """One ratio, committed and measured again."""

    committed: Ratio
    fresh: Ratio

    @property
    def loss(self) -> float:
        """Share by which the fresh ratio is worse; negative = better."""
        share = self.fresh.median / self.committed.median
        return share - 1 if self.committed.goal.smaller_is_better else 1 - share

    @property
    def noise(self) -> float:
        return max(MIN_NOISE, self.committed.noise, self.fresh.noise)

    @property
    def is_loss(self) -> bool:
        return self.loss > self.noise


def changes(committed: Runs, fresh: Runs) -> list[Change]:
    """Of the ratios in both results."""
    before = {ratio.goal: ratio for ratio in ratios(committed)}
    return [Change(before[ratio.goal], ratio) for ratio in ratios(fresh) if ratio.goal in before]

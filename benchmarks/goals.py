"""Which figures are compared, and how: a ratio is taken within each repeat, then the median over the repeats."""

import math
import statistics
from dataclasses import dataclass

from results_file import Pair, Run, newest

MIN_NOISE = 0.02
"""Lower bound, because three repeats may agree by chance."""
MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a normal sample's median divided by that of its mean."""


@dataclass(frozen=True, slots=True)
class Goal:
    key: str
    """Its name for `bench_rivals.py --only`."""
    work: str
    against: str
    figure: str
    reference: str
    gate: float | None = None
    """The ratio that must be reached; None = report only."""
    stretch: float | None = None
    """The ratio we hope to reach; None = no target beyond the gate."""
    floor: float | None = None
    """The best ratio that the bytes to be read allow; None = no such limit."""
    smaller_is_better: bool = False
    in_process: Pair | None = None
    """The same comparison with our engine alone; None = involves no HTTP anyway, or needs HTTP."""

    @property
    def pair(self) -> Pair:
        return self.figure, self.reference

    @property
    def pairs(self) -> list[Pair]:
        return [self.pair, *([self.in_process] if self.in_process else [])]

    @property
    def is_against_rival(self) -> bool:
        """Whether it compares throughput, and with something other than our own server."""
        return " ms, " not in self.reference and "HTTP, " not in self.reference


HTTP_16, HTTP_BASE = "HTTP, 16 adapters", "HTTP, base"
ENGINE_16, ENGINE_BASE = "in process, 16 adapters", "in process, base"
PEFT, TRANSFORMERS = "PEFT, 16 adapters", "transformers generate, base"
VLLM_16, VLLM_BASE = "vLLM, 16 adapters", "vLLM, base"
QWEN_16, QWEN_BASE = "Qwen3 fp32: HTTP, 16 adapters", "Qwen3 fp32: HTTP, base"
PREFIXES = "2k prefixes: HTTP, 4 adapters"

GATED = [
    Goal(
        "peft",
        "16 adapters, HTTP",
        "PEFT, static batches",
        HTTP_16,
        PEFT,
        4.0,
        5.5,
        in_process=(ENGINE_16, PEFT),
    ),
    Goal("vllm", "16 adapters, HTTP", "vLLM, HTTP", HTTP_16, VLLM_16, 8.0, 11.0, in_process=(ENGINE_16, VLLM_16)),
    Goal("vllm-base", "base, HTTP", "vLLM, HTTP", HTTP_BASE, VLLM_BASE, 2.2, 3.0, in_process=(ENGINE_BASE, VLLM_BASE)),
    Goal(
        "transformers",
        "base, HTTP",
        "transformers `generate`, static batches",
        HTTP_BASE,
        TRANSFORMERS,
        1.4,
        1.7,
        in_process=(ENGINE_BASE, TRANSFORMERS),
    ),
    Goal(
        "own-base",
        "16 adapters",
        "own base",
        HTTP_16,
        HTTP_BASE,
        0.50,
        0.60,
        floor=0.69,
        in_process=(ENGINE_16, ENGINE_BASE),
    ),
    Goal(
        "zipf",
        "Zipf mix of 16 adapters",
        "own base",
        "HTTP, Zipf mix",
        HTTP_BASE,
        0.62,
        0.72,
        floor=0.77,
        in_process=("in process, Zipf mix", ENGINE_BASE),
    ),
    Goal(
        "lora-engine",
        "base model, engine with LoRA",
        "engine without LoRA",
        "HTTP, base on the LoRA engine",
        HTTP_BASE,
        0.98,
        1.0,
        floor=1.0,
        in_process=("in process, base on the LoRA engine", ENGINE_BASE),
    ),
    Goal(
        "registered",
        "16 of 2,000 registered adapters",
        "16 of 16",
        "HTTP, 16 adapters of 2,000",
        HTTP_16,
        0.97,
        0.99,
        floor=1.0,
    ),
    *(
        Goal(
            f"decode-{key}",
            f"decode step of 16, {mix}",
            "reading its bytes",
            f"decode step ms, {mix}",
            f"byte floor ms, {mix}",
            1.6,
            1.3,
            floor=1.0,
            smaller_is_better=True,
        )
        for key, mix in (("base", "base"), ("adapters", "16 adapters"))
    ),
    Goal(
        "ttft",
        "TTFT of 1,024 tokens, cached",
        "uncached",
        "TTFT ms, 1,024 tokens cached",
        "TTFT ms, 1,024 tokens uncached",
        0.10,
        0.05,
        floor=0.02,
        smaller_is_better=True,
    ),
    *(
        Goal(
            f"overhead-{sequences}",
            f"a step of {sequences}: time outside its forward pass",
            "the step",
            f"overhead ms, {sequences} sequences",
            f"step ms, {sequences} sequences",
            0.05,
            smaller_is_better=True,
        )
        for sequences in (16, 64)
    ),
]
"""Goals that we commit to."""

REPORTED = [
    Goal(
        "continuous",
        "base, HTTP",
        "transformers `generate_batch`",
        HTTP_BASE,
        "transformers continuous, base",
    ),
    Goal(
        "vllm-plain",
        "16 adapters, HTTP",
        "vLLM without zentorch, HTTP",
        HTTP_16,
        "vLLM without zentorch, 16 adapters",
    ),
    Goal("vllm-plain-base", "base, HTTP", "vLLM without zentorch, HTTP", HTTP_BASE, "vLLM without zentorch, base"),
    Goal("llama-cpp", "16 adapters, HTTP", "llama.cpp, grouped by adapter", HTTP_16, "llama.cpp, 16 adapters"),
    Goal("llama-cpp-base", "base, HTTP", "llama.cpp", HTTP_BASE, "llama.cpp, base"),
    Goal("qwen-peft", "Qwen3 fp32, 16 adapters", "PEFT", QWEN_16, "Qwen3 fp32: PEFT, 16 adapters"),
    Goal("qwen-vllm", "Qwen3 fp32, 16 adapters", "vLLM", QWEN_16, "Qwen3 fp32: vLLM, 16 adapters"),
    Goal("qwen-vllm-base", "Qwen3 fp32, base", "vLLM", QWEN_BASE, "Qwen3 fp32: vLLM, base"),
    Goal(
        "qwen-transformers",
        "Qwen3 fp32, base",
        "transformers `generate`",
        QWEN_BASE,
        "Qwen3 fp32: transformers generate, base",
    ),
    Goal("qwen-own-base", "Qwen3 fp32, 16 adapters", "own base", QWEN_16, QWEN_BASE),
    Goal("prefix-peft", "2k prefixes, 4 adapters", "PEFT", PREFIXES, "2k prefixes: PEFT, 4 adapters"),
    Goal("prefix-vllm", "2k prefixes, 4 adapters", "vLLM", PREFIXES, "2k prefixes: vLLM, 4 adapters"),
    Goal("prefix-cache", "2k prefixes, 4 adapters", "without our cache", PREFIXES, f"{PREFIXES}, no cache"),
]
"""Other comparisons of interest."""

GOALS = GATED + REPORTED


@dataclass(frozen=True, slots=True)
class Ratio:
    """One goal's ratio, in the newest run that measured both figures of the pair."""

    goal: Goal
    run: Run
    pair: Pair

    @property
    def repeats(self) -> list[float]:
        ours, theirs = (self.run.figures[name] for name in self.pair)
        return [a / b for a, b in zip(ours, theirs, strict=True)]

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    @property
    def deviations(self) -> list[float]:
        """Relative deviation of each repeat from the median."""
        return [repeat / self.median - 1 for repeat in self.repeats]

    @property
    def verdict(self) -> str:
        if self.goal.gate is None:
            return ""
        if self.goal.stretch is not None and self._reaches(self.goal.stretch):
            return "stretch"
        return "yes" if self._reaches(self.goal.gate) else "no"

    def _reaches(self, limit: float) -> bool:
        return self.median <= limit if self.goal.smaller_is_better else self.median >= limit


def ratios(runs: list[Run]) -> list[Ratio]:
    """One for each goal for which some run measured both figures."""
    found = [_ratio(runs, goal, goal.pair) for goal in GOALS]
    return [ratio for ratio in found if ratio is not None]


def in_process(runs: list[Run], goal: Goal) -> Ratio | None:
    """The goal's ratio with our engine alone; None if it has none, or no run measured it."""
    return _ratio(runs, goal, goal.in_process) if goal.in_process else None


def _ratio(runs: list[Run], goal: Goal, pair: Pair) -> Ratio | None:
    run = newest(runs, pair)
    return None if run is None else Ratio(goal, run, pair)


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
        """Twice the standard error of the medians' difference. It falls with more repeats; the range would grow.

        In simulations with an unchanged ratio, 3 repeats against 2 to 22, 1 to 4 % of medians were worse by more.
        """
        samples = self.committed.deviations, self.fresh.deviations
        squares = sum(deviation**2 for sample in samples for deviation in sample)
        variance = squares / max(1, sum(map(len, samples)) - len(samples))
        return max(MIN_NOISE, 2 * MEDIAN_ERROR * math.sqrt(variance * sum(1 / len(sample) for sample in samples)))

    @property
    def is_loss(self) -> bool:
        return self.loss > self.noise


def changes(committed: list[Run], fresh: list[Run]) -> list[Change]:
    """One for each ratio that is in both results."""
    before = {ratio.goal: ratio for ratio in ratios(committed)}
    return [Change(before[ratio.goal], ratio) for ratio in ratios(fresh) if ratio.goal in before]

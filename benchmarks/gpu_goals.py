"""Markdown tables: the GPU goals and what one `gpu_suite.py` run measured, and our decode steps against the rivals'.

Run: python benchmarks/gpu_goals.py benchmarks/results/gpu-<device>.json
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.record import Arm, Figure, Record
from gpu.results import NotMeasured, Results
from gpu.work import ATTENTION, RANK_16, Prefill, Work

NOT_MEASURED = "not measured"
ATTENTION_CASES = ("decode 64 x 2048", "decode 8 x 32768", "decode 64 x 256 .. 8192")
MIN_HIDING_PROMPT = 512
"""Tokens of the shortest prompt whose computation can hide an adapter's copy."""


MAX_GOAL_BATCH_SIZE = 64
"""Larger batches are measured, but most goals do not cover them."""
HOST_TIME_LIMITS = {64: (0.5, 0.2), 256: (1.2, 0.5)}
"""(gate, stretch) in ms by batch size."""


@dataclass(frozen=True, slots=True)
class Goal:
    name: str
    where: str
    gate: float
    stretch: float
    measure: Callable[[Results], float]
    """Raises `NotMeasured`."""
    smaller_is_better: bool = False
    scale: float = 1
    """Values are shown multiplied by this, in `unit`."""
    unit: str = ""

    def row(self, results: Results) -> list[str]:
        sign = "≤" if self.smaller_is_better else "≥"
        limits = [f"{sign} {self._text(self.gate)}", f"{sign} {self._text(self.stretch)}"]
        try:
            value = self.measure(results)
        except NotMeasured:
            return [self.name, self.where, *limits, NOT_MEASURED, ""]
        return [self.name, self.where, *limits, f"**{self._text(value)}**", self.verdict(value)]

    def verdict(self, value: float) -> str:
        if self._reaches(value, self.stretch):
            return "stretch"
        return "yes" if self._reaches(value, self.gate) else "no"

    def _reaches(self, value: float, limit: float) -> bool:
        return value <= limit if self.smaller_is_better else value >= limit

    def _text(self, value: float) -> str:
        return f"{value * self.scale:.3g}{self.unit}"


def goals(work: Work) -> list[Goal]:
    sizes, most = [size for size in work.batch_sizes if size <= MAX_GOAL_BATCH_SIZE], work.max_adapters
    points = [(size, count) for size in sizes for count in work.adapter_counts(size) if count]
    return [
        *(_of_floor(size) for size in sizes),
        *(_beyond_bytes(size, count) for size, count in points),
        *(_of_base("LoRA / base, 1 adapter", size, 1, 0.88, 0.95) for size in sizes if size > 1),
        *(_of_base("LoRA / base, 8 adapters", size, 8, 0.85, 0.92) for size in sizes if size > 8),
        _of_base(f"LoRA / base, {most} distinct adapters", most, most, 0.65, 0.74),
        _of_base(f"LoRA / base, {most} distinct adapters on attention", most, most, 0.82, 0.90, ATTENTION.name),
        *(_of_base("base on the engine with LoRA / without", size, 0, 0.99, 1.0) for size in sizes),
        *(_attention(case) for case in ATTENTION_CASES),
        *(_prefill(prompts) for prompts in work.prefills),
        *(_host_time(work, size, *limits) for size, limits in HOST_TIME_LIMITS.items() if size in work.batch_sizes),
        *(_idle(work, size) for size in work.batch_sizes if size > 1),
        *(_cold(num_prompt) for num_prompt in work.cold_prompts if num_prompt >= MIN_HIDING_PROMPT),
        *(_loading(work, num_prompt) for num_prompt in work.loading_prompts),
    ]


def _of_floor(size: int) -> Goal:
    def measure(results: Results) -> float:
        return results.step_ms(Arm.FLOOR, size, 0) / results.step_ms(Arm.NO_LORA, size, 0)

    return Goal("byte floor / step, base-only decode", f"B {size}", 0.80, 0.90, measure)


def _beyond_bytes(size: int, count: int) -> Goal:
    """Time that LoRA adds to a step, minus the time that the adapters' bytes take."""

    def measure(results: Results) -> float:
        added = results.step_ms(Arm.LORA, size, count) - results.step_ms(Arm.NO_LORA, size, 0)
        return added - (results.step_ms(Arm.FLOOR, size, count) - results.step_ms(Arm.FLOOR, size, 0))

    where = f"B {size}, D {count}"
    return Goal("LoRA's time beyond its bytes", where, 0.60, 0.25, measure, smaller_is_better=True, unit=" ms")


def _of_base(name: str, size: int, count: int, gate: float, stretch: float, adapters: str = RANK_16.name) -> Goal:
    """Decode throughput with LoRA divided by that without."""

    def measure(results: Results) -> float:
        return results.step_ms(Arm.NO_LORA, size, 0) / results.step_ms(Arm.LORA, size, count, adapters)

    return Goal(name, f"B {size}", gate, stretch, measure)


def _attention(case: str) -> Goal:
    def measure(results: Results) -> float:
        return results.attention_share(case)

    return Goal("decode attention / bandwidth", case, 0.75, 0.88, measure, scale=100, unit=" %")


def _prefill(prompts: Prefill) -> Goal:
    size, count, num_prompt = prompts.batch_size, prompts.num_adapters, prompts.prompt_tokens

    def measure(results: Results) -> float:
        base = results.value(Arm.NO_LORA, Figure.PREFILL, size, 0, num_prompt)
        return results.value(Arm.LORA, Figure.PREFILL, size, count, num_prompt) / base - 1

    where = f"{size} x {num_prompt} tokens, D {count}"
    return Goal("LoRA adds to prefill", where, 0.08, 0.03, measure, smaller_is_better=True, scale=100, unit=" %")


def _host_time(work: Work, size: int, gate: float, stretch: float) -> Goal:
    count = work.adapter_counts(size)[-1]

    def measure(results: Results) -> float:
        return results.decode(Arm.LORA, Figure.HOST, size, count)

    where = f"B {size}, D {count}"
    return Goal("host time of a step", where, gate, stretch, measure, smaller_is_better=True, unit=" ms")


def _idle(work: Work, size: int) -> Goal:
    count = work.adapter_counts(size)[-1]

    def measure(results: Results) -> float:
        return results.decode(Arm.LORA, Figure.GPU_WAITS_P50, size, count) * 1e3

    where = f"B {size}, D {count}, profiled, p50"
    return Goal("GPU waits for the host in a step", where, 60, 20, measure, smaller_is_better=True, unit=" µs")


def _cold(num_prompt: int) -> Goal:
    def measure(results: Results) -> float:
        added = results.value(Arm.LORA, Figure.FROM_HOST_ADDS, 1, 1, num_prompt)
        return added / results.value(Arm.MACHINE, Figure.ADAPTER_COPY, 0, 1, 0)

    where = f"prompt of {num_prompt}"
    return Goal("cold adapter adds / its copy alone", where, 0.5, 0.15, measure, smaller_is_better=True)


def _loading(work: Work, num_prompt: int) -> Goal:
    """Gap between other requests' tokens when an adapter loads, divided by the gap from that request's prompt alone."""
    size = work.loading_batch_size
    count = work.num_used_while_loading

    def measure(results: Results) -> float:
        loading, loaded = (
            results.value(Arm.LORA, figure, size, count, num_prompt)
            for figure in (Figure.GAP_LOADING, Figure.GAP_LOADED)
        )
        return loading / loaded

    where = f"B {size}, D {count}, p99, prompt of {num_prompt}"
    return Goal("others' tokens while an adapter loads / loaded", where, 1.10, 1.03, measure, smaller_is_better=True)


def goals_table(results: Results, work: Work) -> str:
    rows = [goal.row(results) for goal in goals(work)]
    return _table(["goal", "where", "gate", "stretch", "measured", "met"], rows)


def rivals_table(results: Results) -> str:
    """One row for each decode step measured for a rival; ours is from the engine that serves the same requests."""
    steps = [each for each in results.records if each.figure is Figure.DECODE_STEP]
    rows = [_rival_row(each, results) for each in steps if each.arm in (Arm.TRANSFORMERS, Arm.PEFT)]
    return _table(["against", "where", "their step", "our step", "theirs / ours"], rows) if rows else NOT_MEASURED


def _rival_row(theirs: Record, results: Results) -> list[str]:
    size, count = theirs.batch_size, theirs.num_adapters
    cells = [theirs.arm.value, f"B {size}, D {count}", f"{theirs.value:.3g} ms"]
    try:
        ours = results.step_ms(Arm.LORA if count else Arm.NO_LORA, size, count)
    except NotMeasured:
        return [*cells, NOT_MEASURED, ""]
    return [*cells, f"{ours:.3g} ms", f"**{theirs.value / ours:.3g}**"]


def report(content: Mapping[str, Any]) -> str:
    """The tables for the content of a `gpu_suite.py` file."""
    work = Work()
    results = Results(content, work.num_tokens)
    libraries = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    about = f"{content['machine']['gpu']}, {content['date']}, commit `{content['commit']}`, {libraries}"
    legend = "B requests at once, D distinct adapters among them."
    return f"{about}. {legend}\n\n{goals_table(results, work)}\n\n{rivals_table(results)}\n"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    print(report(json.loads(parser.parse_args().results.read_text())))


if __name__ == "__main__":
    main()

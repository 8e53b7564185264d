"""Compares the speed of several kinds of adapters in one engine, in turn."""

import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import count
from time import perf_counter

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams

PROMPT_TOKENS = 128
STEPS = 48
LONG_PROMPT = 1000
REPEATS = 5

_numbers = count()

Digests = Mapping[str, Sequence[str]]
"""Digests of the adapters of each kind."""


def compare(engine: Engine, digests: Digests) -> None:
    """Print one JSON line per case: median times in ms, and the ratios to the first kind."""
    for case, times in (
        ("first use", _first_uses(engine, digests)),
        ("prompt of one token", _prompts(engine, digests, 1)),
        (f"prompt of {LONG_PROMPT} tokens", _prompts(engine, digests, LONG_PROMPT)),
        ("decode step, each sequence its adapter", _steps(engine, digests)),
        ("decode step, all one adapter", _steps(engine, {kind: found[:1] for kind, found in digests.items()})),
    ):
        medians = {kind: 1000 * statistics.median(found) for kind, found in times.items()}
        first = next(iter(medians))
        shown = {kind: round(median, 3) for kind, median in medians.items()}
        ratios = {f"{kind} / {first}": round(medians[kind] / medians[first], 3) for kind in [*medians][1:]}
        print(json.dumps({"case": case, **shown, **ratios}), flush=True)


def _first_uses(engine: Engine, digests: Digests) -> dict[str, list[float]]:
    """Time from the request to the first token, for a prompt of one token and an adapter that is on disk."""
    return {kind: [_run_s(engine, [digest], 1) for digest in found] for kind, found in digests.items()}


def _prompts(engine: Engine, digests: Digests, num_tokens: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {kind: [] for kind in digests}
    for _ in range(REPEATS):
        for kind, found in digests.items():
            times[kind].append(_run_s(engine, found[:1], num_tokens))
    return times


def _steps(engine: Engine, digests: Digests) -> dict[str, list[float]]:
    """Median times of steps in which each of 16 sequences gets its next token."""
    times: dict[str, list[float]] = {kind: [] for kind in digests}
    for _ in range(REPEATS):
        for kind, found in digests.items():
            asked = [found[i % len(found)] for i in range(16)]
            times[kind].append(statistics.median(_step_times(engine, asked)))
    return times


def _step_times(engine: Engine, digests: Sequence[str]) -> list[float]:
    for digest in digests:
        engine.add_request(_request(digest, PROMPT_TOKENS, STEPS))
    times: list[float] = []
    while engine.has_work():
        start = perf_counter()
        outputs = engine.step()
        if sum(len(output.token_ids) for output in outputs) == len(digests):
            times.append(perf_counter() - start)
    return times


def _run_s(engine: Engine, digests: Sequence[str], num_tokens: int) -> float:
    start = perf_counter()
    for digest in digests:
        engine.add_request(_request(digest, num_tokens, 1))
    while engine.has_work():
        engine.step()
    return perf_counter() - start


def _request(digest: str, num_tokens: int, max_tokens: int) -> EngineRequest:
    """A request with a prompt that no other request had."""
    number = next(_numbers)
    prompt = [2 + number, *[100 + number % 97] * (num_tokens - 1)]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(str(number), prompt, sampling, digest)

"""Quantized weights against the model's own: decode steps, prompts, memory. The engines take turns step by step.

Run: python benchmarks/bench_quantized.py --model MODEL [--dtype float32]
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from in_process import start_engine
from loraserve_kernels.quantization import ROUNDINGS

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams

NUM_SEQUENCES = (1, 4, 8, 16, 32)
PROMPT_TOKENS = 128
STEPS = 48
LONG_PROMPT = 1000
REPEATS = 5


def main() -> None:
    """Prints one JSON line per case; times in ms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    engines = {
        quantization: start_engine(args.model, enable_lora=False, dtype=args.dtype, quantization=quantization)
        for quantization in ("none", *ROUNDINGS)
    }
    sizes = {name: round(engine._runner._model.weight_bytes / 1e6) for name, engine in engines.items()}
    print(json.dumps({"case": "weights, MB", **sizes}), flush=True)
    for num_sequences in NUM_SEQUENCES:
        _print(f"step, {num_sequences} sequences", _decode(engines, num_sequences))
    _print(f"prompt, {LONG_PROMPT} tokens", _prompts(engines))


def _print(case: str, times: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(found) for name, found in times.items()}
    shown = {name: round(1000 * seconds, 2) for name, seconds in medians.items()}
    ratios = {f"none / {name}": round(medians["none"] / medians[name], 2) for name in ROUNDINGS}
    print(json.dumps({"case": case, **shown, **ratios}), flush=True)


def _decode(engines: dict[str, Engine], num_sequences: int) -> dict[str, list[float]]:
    """Seconds of the steps in which every sequence gets its next token, by engine."""
    for engine in engines.values():
        for i in range(num_sequences):
            engine.add_request(_request(f"{num_sequences}-{i}", i, PROMPT_TOKENS, STEPS))
    times: dict[str, list[float]] = {name: [] for name in engines}
    for name, seconds, num_tokens in _steps(engines):
        if num_tokens == num_sequences:
            times[name].append(seconds)
    return times


def _prompts(engines: dict[str, Engine]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(REPEATS):
        for name, engine in engines.items():
            engine.add_request(_request(f"long-{repeat}", 100 + repeat, LONG_PROMPT, 1))
            times[name].append(sum(seconds for _, seconds, _ in _steps({name: engine})))
    return times


def _steps(engines: dict[str, Engine]) -> Iterator[tuple[str, float, int]]:
    """(engine, seconds, tokens) of each step."""
    while any(engine.has_work() for engine in engines.values()):
        for name, engine in engines.items():
            start = perf_counter()
            outputs = engine.step()
            yield name, perf_counter() - start, sum(len(output.token_ids) for output in outputs)


def _request(request_id: str, first: int, num_tokens: int, max_tokens: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id, [2 + first, *[1 + first % 97] * (num_tokens - 1)], sampling)


if __name__ == "__main__":
    main()

"""DoRA against plain LoRA: the same adapters with and without magnitudes.

Measures first uses, then prompts and decode steps with both kinds in turn.

Run: python benchmarks/bench_dora.py --model MODEL --adapters ADAPTER..., such as those in benchmarks/out
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from time import perf_counter

from in_process import load_adapters, start_engine
from safetensors.torch import load_file, save_file
from torch import Tensor, ones

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams

PROMPT_TOKENS = 128
STEPS = 48
LONG_PROMPT = 1000
REPEATS = 5

_numbers = count()


def main() -> None:
    """Prints one JSON line per case: median times in ms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    engine = start_engine(args.model, enable_lora=True)
    with tempfile.TemporaryDirectory() as folder:
        twins = [_with_magnitudes(path, Path(folder) / path.name) for path in args.adapters]
        digests = {
            "plain": [*load_adapters(engine, args.adapters, Path(folder)).values()],
            "dora": [*load_adapters(engine, twins, Path(folder)).values()],
        }
        for case, times in (
            ("first use", _first_uses(engine, digests)),
            ("prompt of one token", _prompts(engine, digests, 1)),
            (f"prompt of {LONG_PROMPT} tokens", _prompts(engine, digests, LONG_PROMPT)),
            ("decode step, each sequence its adapter", _steps(engine, digests)),
            ("decode step, all one adapter", _steps(engine, {kind: found[:1] for kind, found in digests.items()})),
        ):
            medians = {kind: statistics.median(found) for kind, found in times.items()}
            shown = {kind: round(1000 * seconds, 3) for kind, seconds in medians.items()}
            ratio = round(medians["dora"] / medians["plain"], 3)
            print(json.dumps({"case": case, **shown, "dora / plain": ratio}), flush=True)


def _with_magnitudes(plain: Path, folder: Path) -> Path:
    """A copy of the adapter with magnitudes of 1; their values do not affect the time."""
    shutil.copytree(plain, folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    tensors: dict[str, Tensor] = load_file(weights)
    magnitudes = {
        name.replace("lora_B.weight", "lora_magnitude_vector"): ones(len(tensor))
        for name, tensor in tensors.items()
        if name.endswith("lora_B.weight")
    }
    save_file(tensors | magnitudes, weights, metadata={"format": "pt"})
    return folder


def _first_uses(engine: Engine, digests: dict[str, list[str]]) -> dict[str, list[float]]:
    """Time from the request to the first token, for a prompt of one token and an adapter that is on disk."""
    return {kind: [_run_s(engine, [digest], 1) for digest in found] for kind, found in digests.items()}


def _prompts(engine: Engine, digests: dict[str, list[str]], num_tokens: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {kind: [] for kind in digests}
    for _ in range(REPEATS):
        for kind, found in digests.items():
            times[kind].append(_run_s(engine, found[:1], num_tokens))
    return times


def _steps(engine: Engine, digests: dict[str, list[str]]) -> dict[str, list[float]]:
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


if __name__ == "__main__":
    main()

"""Activated LoRA: an adapter's time to first token when the base model has already processed the context.

For each new context: the base model processes it. Then the plain adapter, the same adapter activated, and the base
model each answer the context followed by the invocation tokens, in random order. One request at a time.

Run: python benchmarks/bench_activated.py --model MODEL --adapter ADAPTER, such as those in benchmarks/out
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

from in_process import load_adapters, start_engine

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams

INVOCATION = [11, 7, 5, 3]
CONTEXTS = (256, 1024, 3072)
"""Lengths in tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    engine = start_engine(args.model, enable_lora=True)
    with tempfile.TemporaryDirectory() as folder:
        activated = _activated(args.adapter, Path(folder) / "activated")
        digests = load_adapters(engine, [args.adapter, activated], Path(folder))
        asked = {"plain": digests[args.adapter.name], "activated": digests["activated"], "base": None}
        for num_tokens in CONTEXTS:
            print(json.dumps(_measure(engine, num_tokens, asked, args.repeats)), flush=True)


def _activated(plain: Path, folder: Path) -> Path:
    """A copy of the adapter that is active only from the invocation tokens on."""
    shutil.copytree(plain, folder)
    config = folder / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM"}
    config.write_text(json.dumps(fields))
    return folder


def _measure(engine: Engine, num_tokens: int, asked: dict[str, str | None], repeats: int) -> dict[str, object]:
    rng = random.Random(num_tokens)
    times: dict[str, list[float]] = {name: [] for name in asked}
    for repeat in range(repeats + 1):
        context = [rng.randrange(100, 1000) for _ in range(num_tokens)]
        _first_token_s(engine, context, None)
        for name in rng.sample([*asked], len(asked)):
            seconds = _first_token_s(engine, [*context, *INVOCATION], asked[name])
            if repeat > 0:  # the first repeat loads the adapters
                times[name].append(seconds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "context_tokens": num_tokens,
        "ttft_ms": {name: round(1000 * seconds, 2) for name, seconds in medians.items()},
        "activated / plain": round(medians["activated"] / medians["plain"], 3),
        "activated / base": round(medians["activated"] / medians["base"], 2),
    }


def _first_token_s(engine: Engine, prompt: list[int], digest: str | None) -> float:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    start = perf_counter()
    engine.add_request(EngineRequest("asked", prompt, sampling, digest))
    while engine.has_work():
        engine.step()
    return perf_counter() - start


if __name__ == "__main__":
    main()

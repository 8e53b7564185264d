"""Milliseconds of a decode step at batch 16, and of reading the same bytes with all threads. Prints one JSON line.

The bytes of a step: all weights except the embedding table, the adapters, and the keys and values of every sequence.
The read is torch's `sum` over buffers of the same total size. Rounds of steps and reads alternate, so that both run
under the same conditions. Buffers are large because every call has to start the threads: in pieces of 4 MB the same
bytes took 13 % longer.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import shapes
import torch
from in_process import load_adapters, start_engine

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams

BATCH_SIZE = 16
PROMPT_TOKENS = 128
STEPS = 96
ROUNDS = 4
BUFFER_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    engine = start_engine(args.model, enable_lora=bool(args.adapters))
    weight_bytes = shapes.model_bytes(args.model) + sum(map(shapes.adapter_bytes, args.adapters))
    step_bytes = weight_bytes + BATCH_SIZE * (PROMPT_TOKENS + STEPS // 2) * shapes.kv_bytes_per_token(args.model)
    with tempfile.TemporaryDirectory() as folder:
        digests = list(load_adapters(engine, args.adapters, Path(folder)).values())
        _add_requests(engine, digests)
        steps, reads = _measure(engine, step_bytes)
    print(json.dumps({"step_ms": statistics.median(steps), "read_ms": statistics.median(reads)}))


def _add_requests(engine: Engine, digests: list[str]) -> None:
    sampling = SamplingParams(max_tokens=STEPS + 8, temperature=0.0, ignore_eos=True)
    for i in range(BATCH_SIZE):
        digest = digests[i % len(digests)] if digests else None
        engine.add_request(EngineRequest(f"request-{i}", [1 + i] * PROMPT_TOKENS, sampling, digest))


def _measure(engine: Engine, step_bytes: int) -> tuple[list[float], list[float]]:
    buffers = [torch.ones(BUFFER_BYTES // 4) for _ in range(-(-step_bytes // BUFFER_BYTES))]
    scale = step_bytes / (len(buffers) * BUFFER_BYTES)
    while sum(len(output.token_ids) for output in engine.step()) < BATCH_SIZE:
        pass
    steps, reads = [], []
    for _ in range(ROUNDS):
        for _ in range(STEPS // ROUNDS):
            steps.append(_ms(engine.step))
        reads += [_ms(lambda: [buffer.sum() for buffer in buffers]) * scale for _ in range(STEPS // ROUNDS)]
    return steps, reads


def _ms(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return (perf_counter() - start) * 1000


if __name__ == "__main__":
    main()

"""Our engine without HTTP: the same requests, 16 kept running. Prints one JSON line."""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed_file import packed_file_name
from workload import WorkItem, make_work

from loraserve.engine.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams

CONCURRENCY = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="*", default=[])
    parser.add_argument("--num-requests", type=int, required=True)
    parser.add_argument("--spread", type=float, required=True)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--no-lora", action="store_true", help="Build the engine without LoRA.")
    parser.add_argument("--profile", type=Path, help="Write a cProfile of the measured part.")
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    engine = Engine(
        EngineConfig(model=str(args.model), num_threads=threads, enable_lora=not args.no_lora), lambda *_: None
    )
    with tempfile.TemporaryDirectory() as folder:
        digests = _load(engine, args.adapters, Path(folder))
        vocab_size = engine.describe().vocab_size
        work = make_work(
            num_requests=args.num_requests, num_adapters=len(digests), vocab_size=vocab_size, spread=args.spread
        )
        warm_up = make_work(num_requests=16, num_adapters=len(digests), vocab_size=100, output_mean=4, seed=1)
        _run(engine, warm_up, digests, "warm", args.concurrency)
        before = engine.stats()
        start = time.perf_counter()
        if args.profile:
            import cProfile

            with cProfile.Profile() as profile:
                _run(engine, work, digests, "work", args.concurrency)
            profile.dump_stats(args.profile)
        else:
            _run(engine, work, digests, "work", args.concurrency)
        seconds = time.perf_counter() - start
    after = engine.stats()
    num_tokens = after.num_generation_tokens - before.num_generation_tokens
    assert num_tokens == sum(item.num_output_tokens for item in work), "a request got another number of tokens"
    num_steps = after.step - before.step
    print(
        json.dumps(
            {
                "output_tokens": num_tokens,
                "seconds": seconds,
                "output_tokens_per_s": num_tokens / seconds,
                "num_steps": num_steps,
                "ms_per_step": seconds / num_steps * 1000,
                "backend": engine.describe().backend,
            }
        )
    )


def _load(engine: Engine, adapters: list[Path], folder: Path) -> list[str]:
    layout = engine.describe().layout
    digests = []
    for path in adapters:
        packed = load_and_pack(path, layout, folder)
        engine.load_adapter(packed.digest, str(folder / packed_file_name(packed.digest, layout)))
        digests.append(packed.digest)
    return digests


def _run(engine: Engine, work: list[WorkItem], digests: list[str], prefix: str, concurrency: int) -> None:
    remaining = list(reversed(list(enumerate(work))))
    num_running = 0
    while remaining or num_running:
        while remaining and num_running < concurrency:
            i, item = remaining.pop()
            sampling = SamplingParams(max_tokens=item.num_output_tokens, temperature=0.0, ignore_eos=True)
            digest = None if item.adapter is None else digests[item.adapter]
            engine.add_request(EngineRequest(f"{prefix}-{i}", item.prompt_token_ids, sampling, digest))
            num_running += 1
        for output in engine.step():
            assert output.error is None, output.error
            num_running -= output.finish_reason is not None


if __name__ == "__main__":
    main()

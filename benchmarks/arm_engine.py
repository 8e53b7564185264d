"""Our engine without HTTP, with 16 requests in flight at any time. Prints one JSON line."""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter

from in_process import load_adapters, start_engine
from requests_file import Request, read_requests

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams

CONCURRENCY = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="*", default=[])
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--profile", type=Path, help="Write a cProfile of the measured part.")
    args = parser.parse_args()
    engine = start_engine(args.model, enable_lora=bool(args.adapters))
    requests = read_requests(args.requests)
    with tempfile.TemporaryDirectory() as folder:
        digests = load_adapters(engine, args.adapters, Path(folder))
        warm_up = [Request(request.model, [1 + i] * 100, 4) for i, request in enumerate(requests[:CONCURRENCY])]
        _answer(engine, warm_up, digests, "warm")
        before = engine.stats()
        start = perf_counter()
        if args.profile:
            import cProfile

            with cProfile.Profile() as profile:
                _answer(engine, requests, digests, "work")
            profile.dump_stats(args.profile)
        else:
            _answer(engine, requests, digests, "work")
        seconds = perf_counter() - start
    after = engine.stats()
    num_steps = after.step - before.step
    print(
        json.dumps(
            {
                "output_tokens": after.num_generation_tokens - before.num_generation_tokens,
                "seconds": seconds,
                "num_steps": num_steps,
                "ms_per_step": seconds / num_steps * 1000,
            }
        )
    )


def _answer(engine: Engine, requests: list[Request], digests: dict[str, str], prefix: str) -> None:
    waiting = list(reversed(list(enumerate(requests))))
    num_running = 0
    while waiting or num_running:
        while waiting and num_running < CONCURRENCY:
            i, request = waiting.pop()
            sampling = SamplingParams(max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True)
            digest = digests.get(request.model)
            engine.add_request(EngineRequest(f"{prefix}-{i}", request.prompt_token_ids, sampling, digest))
            num_running += 1
        for output in engine.step():
            assert output.error is None, output.error
            num_running -= output.finish_reason is not None


if __name__ == "__main__":
    main()

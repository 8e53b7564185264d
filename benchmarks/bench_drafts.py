"""Speculative decoding: the time that drafts save when right, and cost when wrong; without and with drafts in turn.

Sequences are decoded without drafts, and again with predictions: their own answer; the same with every sixth token
replaced; and tokens that are all wrong. Tokens are sampled at random, so that sequences do not repeat themselves.
Times cover the decode steps, from the first token to the last.

Run: python benchmarks/bench_drafts.py --model MODEL [--adapters ADAPTER ...], such as those in benchmarks/out
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

from in_process import load_adapters, start_engine

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.scheduling.drafter import Drafter

NUM_TOKENS = 96
WRONG_EVERY = 6
MAX_SPECULATIVE_TOKENS = 16
"""A server's default."""
Answers = dict[str, list[int]]
"""Tokens by request id."""
Predict = Callable[[list[int]], list[int]]
"""Maps an answer to the prediction for it."""

PREDICTIONS: dict[str, Predict] = {
    "right": lambda tokens: tokens,
    "every sixth token wrong": lambda tokens: [
        abs(token - 1) if i % WRONG_EVERY == WRONG_EVERY - 1 else token for i, token in enumerate(tokens)
    ],
    "wrong": lambda tokens: [abs(token - 1) for token in tokens],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="*", default=[])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    engine = start_engine(args.model, enable_lora=bool(args.adapters), num_speculative_tokens=MAX_SPECULATIVE_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        digests = list(load_adapters(engine, args.adapters, Path(folder)).values())
        for num_sequences in (1, 2, 4, 8):
            requests = _requests(num_sequences, args.prompt_tokens, digests)
            print(json.dumps(_measure(engine, requests, args.repeats)), flush=True)


def _requests(num_sequences: int, num_prompt_tokens: int, digests: list[str]) -> list[EngineRequest]:
    rng = random.Random(num_sequences)
    return [
        EngineRequest(
            str(i),
            [rng.randrange(1000) for _ in range(num_prompt_tokens)],
            SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=i, ignore_eos=True),
            digests[i % len(digests)] if digests else None,
        )
        for i in range(num_sequences)
    ]


def _measure(engine: Engine, requests: list[EngineRequest], repeats: int) -> dict[str, object]:
    with patch.object(Drafter, "add_drafts"):
        _, answers = _decode(engine, requests, None, {})
    times: dict[str, list[float]] = {name: [] for name in ("without", *PREDICTIONS)}
    for _ in range(repeats):
        with patch.object(Drafter, "add_drafts"):
            times["without"].append(_decode(engine, requests, None, answers)[0])
        for name, predict in PREDICTIONS.items():
            seconds, found = _decode(engine, requests, predict, answers)
            assert found == answers, "drafts changed an answer"
            times[name].append(seconds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "sequences": len(requests),
        "ms_a_token_without": 1000 * medians["without"] / (NUM_TOKENS - 1),
        "times_as_fast": {name: round(medians["without"] / medians[name], 2) for name in PREDICTIONS},
    }


def _decode(
    engine: Engine, requests: list[EngineRequest], predict: Predict | None, answers: Answers
) -> tuple[float, Answers]:
    """(seconds from the first tokens to the end, answers)."""
    for request in requests:
        predicted = [] if predict is None else predict(answers[request.request_id])
        engine.add_request(replace(request, predicted_token_ids=predicted))
    found: Answers = {request.request_id: [] for request in requests}
    while not all(found.values()):
        _step(engine, found)
    start = perf_counter()
    while engine.has_work():
        _step(engine, found)
    return perf_counter() - start, found


def _step(engine: Engine, found: Answers) -> None:
    for output in engine.step():
        found[output.request_id] += output.token_ids


if __name__ == "__main__":
    main()

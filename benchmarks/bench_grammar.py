"""Time saved by appending tokens that a grammar forces: sequences constrained by a schema, with and without, in turn.

Run: python benchmarks/bench_grammar.py --model benchmarks/out/llama-100m
"""

import argparse
import json
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

from in_process import start_engine

from loraserve.engine.engine import Engine
from loraserve.engine.grammars.matcher import GrammarMatcher
from loraserve.engine.request import EngineRequest, Grammar, GrammarKind, SamplingParams

FIELDS = {
    "customer_reference": {"type": "integer", "minimum": 1000, "maximum": 9999},
    "delivery_status": {"enum": ["in transit", "delivered", "returned to sender"]},
    "requires_signature": {"type": "boolean"},
    "estimated_arrival_days": {"type": "integer", "minimum": 0, "maximum": 60},
    "priority_category": {"enum": ["standard", "express", "overnight"]},
}
SCHEMA = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
NUM_SEQUENCES = 16
NUM_PROMPT_TOKENS = 128


def measure(engine: Engine, run: str) -> tuple[float, int, int]:
    """(seconds, tokens, steps) of a batch."""
    for seed in range(NUM_SEQUENCES):
        sampling = SamplingParams(max_tokens=400, temperature=1.0, seed=seed, grammar=GRAMMAR)
        engine.add_request(EngineRequest(f"{run} {seed}", [2 + seed, *[5] * (NUM_PROMPT_TOKENS - 1)], sampling))
    start, num_tokens, num_steps = perf_counter(), 0, 0
    while engine.has_work():
        num_tokens += sum(len(output.token_ids) for output in engine.step())
        num_steps += 1
    return perf_counter() - start, num_tokens, num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    engine = start_engine(args.model, enable_lora=False)
    measure(engine, "warm-up")
    for repeat in range(args.repeats):
        appended = measure(engine, f"appended {repeat}")
        with patch.object(GrammarMatcher, "forced_tokens", return_value=[]):
            sampled = measure(engine, f"sampled {repeat}")
        columns = ("seconds", "tokens", "steps")
        result = {
            "appended": dict(zip(columns, appended, strict=True)),
            "sampled": dict(zip(columns, sampled, strict=True)),
            "speedup": sampled[0] / appended[0],
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

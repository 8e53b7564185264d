"""Multi-head latent attention: a KV cache of latents against one of expanded keys and values, in one process each.

Random weights in the shapes of Youtu-LLM-2B, an eighth of its layers. Expanded is what GPUs compute.

Run: python benchmarks/bench_latent.py; heads of GLM-4.7-Flash: --heads 20 --key-dim 192 --value-dim 256
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from in_process import start_engine
from shapes import tokenizer_of
from transformers import YoutuConfig

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.models import structure

CONTEXTS = (128, 2048)
SEQUENCES = (1, 8)
STEPS = 12
KINDS = ("expanded", "latent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, default=128)
    args = parser.parse_args()
    if args.only is None:
        found = {kind: _measured_alone(kind) for kind in KINDS}
        ratios = {key: round(found["latent"][key] / value, 3) for key, value in found["expanded"].items()}
        print(json.dumps({**found, "latent / expanded": ratios}, indent=1))
        return
    if args.only == "expanded":
        structure.find_latent = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_measure(args, Path(folder))))


def _measured_alone(kind: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", kind, *sys.argv[1:]]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    YoutuConfig(
        vocab_size=32_768,
        max_position_embeddings=8192,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=4,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=args.key_dim,
        qk_rope_head_dim=64,
        v_head_dim=args.value_dim,
        bos_token_id=0,
        eos_token_id=1,
        dtype=torch.bfloat16,
    ).save_pretrained(folder)
    tokenizer_of(32_768).save_pretrained(folder)
    engine = start_engine(folder, enable_lora=False, load_format="dummy")
    specs = engine._runner._model.kv_specs
    found: dict[str, float] = {"kv_bytes_per_token": 2 * sum(spec.elements_per_token for spec in specs)}
    for context in CONTEXTS:
        found[f"prompt_{context}_ms"] = _prompt_ms(engine, context)
        for num_seqs in SEQUENCES:
            found[f"step_{num_seqs}_at_{context}_ms"] = _decode_step_ms(engine, num_seqs, context)
    return found


def _decode_step_ms(engine: Engine, num_seqs: int, context: int) -> float:
    """Median, of steps in which all sequences are decoding."""
    for index in range(num_seqs):
        steps = STEPS + num_seqs * context // 256  # those that come first wait for the others' prompts
        _ask(engine, f"{context} {num_seqs} {index}", _prompt(index, context), steps)
    times = []
    while engine.has_work():
        start = perf_counter()
        num_outputs = len(engine.step())
        if num_outputs == num_seqs:
            times.append(perf_counter() - start)
    return round(1e3 * statistics.median(times[1:]), 2)


def _prompt_ms(engine: Engine, num_tokens: int) -> float:
    times = []
    for seed in range(100, 103):
        start = perf_counter()
        _ask(engine, "asked", _prompt(seed, num_tokens), 1)
        while engine.has_work():
            engine.step()
        times.append(perf_counter() - start)
    return round(1e3 * statistics.median(times), 1)


def _prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 1000) for _ in range(num_tokens)]


def _ask(engine: Engine, request_id: str, prompt: list[int], num_tokens: int) -> None:
    engine.add_request(
        EngineRequest(request_id, prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    )


if __name__ == "__main__":
    main()

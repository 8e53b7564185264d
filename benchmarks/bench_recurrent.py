"""Models with recurrent layers: decode steps over the time to read their bytes, prompts that continue a saved state.

Random weights. Each model once, in a process of its own; the floor is a read at the bandwidth measured there.

Run: python benchmarks/bench_recurrent.py [--only NAME]
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
from timing import copies_beyond_cache, read_us
from transformers import GraniteMoeHybridConfig, Lfm2Config, PreTrainedConfig, Qwen3_5TextConfig, Qwen3Config

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams

COMMON = {"vocab_size": 32_768, "max_position_embeddings": 8192, "tie_word_embeddings": True}
PROMPT_TOKENS, STEPS = 1024, 30
READ_BYTES = 256 << 20


def configs() -> dict[str, PreTrainedConfig]:
    """A quarter of the layers of Qwen3.5-0.8B, LFM2-350M, Granite-4.0-H-350M and, with attention alone, Qwen3-0.6B."""
    return {
        "gated delta net": Qwen3_5TextConfig(
            **COMMON,
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            layer_types=([*["linear_attention"] * 3, "full_attention"]) * 2,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
        "short convolution": Lfm2Config(
            **COMMON,
            hidden_size=1024,
            intermediate_size=6656,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=8,
            layer_types=["conv", "conv", "full_attention", "conv"] * 2,
        ),
        "Mamba-2": GraniteMoeHybridConfig(
            **COMMON,
            hidden_size=768,
            shared_intermediate_size=2048,
            num_hidden_layers=8,
            num_attention_heads=12,
            num_key_value_heads=4,
            num_local_experts=0,
            layer_types=([*["mamba"] * 7, "attention"]),
            mamba_n_heads=48,
            mamba_d_head=32,
            mamba_d_state=128,
        ),
        "attention": Qwen3Config(
            **COMMON,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=configs())
    args = parser.parse_args()
    if args.only is None:
        for name in configs():
            subprocess.run([sys.executable, __file__, "--only", name], check=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"model": args.only, **_measure(configs()[args.only], Path(folder))}), flush=True)


def _measure(config: PreTrainedConfig, folder: Path) -> dict[str, object]:
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tokenizer_of(config.vocab_size).save_pretrained(folder)
    engine = start_engine(folder, enable_lora=False, load_format="dummy")
    model = engine._runner._model
    bytes_per_us = READ_BYTES / read_us(READ_BYTES, copies_beyond_cache(READ_BYTES))
    state_bytes = sum(spec.num_bytes for spec in model.state_specs)
    found: dict[str, object] = {"weights_mb": model.weight_bytes >> 20, "state_mb": round(state_bytes / 2**20, 2)}
    for num_seqs in (1, 16):
        step_us = _decode_step_us(engine, num_seqs)
        floor_us = (model.weight_bytes + 2 * num_seqs * state_bytes) / bytes_per_us
        found |= {
            f"step_{num_seqs}_ms": round(step_us / 1000, 1),
            f"step_{num_seqs} / floor": round(step_us / floor_us, 2),
        }
    first, second = [], []
    for seed in range(5):
        rng = random.Random(seed)
        prompt = [rng.randrange(100, 1000) for _ in range(PROMPT_TOKENS)]
        first.append(_first_token_us(engine, prompt))
        second.append(_first_token_us(engine, [*prompt, *range(100, 120)]))
    found["prompt_ms"] = round(statistics.median(first) / 1000)
    found["second turn / first"] = round(statistics.median(second) / statistics.median(first), 3)
    return found


def _decode_step_us(engine: Engine, num_seqs: int) -> float:
    """Median, of steps in which all sequences are decoding."""
    for index in range(num_seqs):
        rng = random.Random(index)
        _ask(engine, f"{num_seqs} {index}", [rng.randrange(100, 1000) for _ in range(32)], STEPS)
    times = []
    while engine.has_work():
        start = perf_counter()
        num_outputs = len(engine.step())
        if num_outputs == num_seqs:
            times.append(perf_counter() - start)
    return 1e6 * statistics.median(times[2:])


def _first_token_us(engine: Engine, prompt: list[int]) -> float:
    start = perf_counter()
    _ask(engine, "asked", prompt, 1)
    while engine.has_work():
        engine.step()
    return 1e6 * (perf_counter() - start)


def _ask(engine: Engine, request_id: str, prompt: list[int], num_tokens: int) -> None:
    engine.add_request(
        EngineRequest(request_id, prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    )


if __name__ == "__main__":
    main()

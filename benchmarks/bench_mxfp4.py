"""Experts kept in MXFP4 beside the same made whole: start, memory and decode steps, each in a process of its own.

The model has gpt-oss-20b's shapes, a quarter of its layers, and random weights; made whole it takes 16 GB to load.

Run: python benchmarks/bench_mxfp4.py
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
from in_process import start_engine
from safetensors.torch import save_file
from transformers import AutoTokenizer, GptOssConfig, GptOssForCausalLM

from loraserve.engine import startup
from loraserve.engine.request import EngineRequest, SamplingParams

MODEL = Path("benchmarks/out/gpt-oss-6-layers")
TOKENIZER = Path("loraserve/demo/model")
NUM_SEQUENCES = (1, 4, 16)
PROMPT_TOKENS = 64
STEPS = 24
REPEATS = 2
GROUP = 32


def main() -> None:
    """Prints one JSON line a run of each, then one with medians; times in ms but for the start's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=["kept", "whole"], help="one run in this process")
    arm = parser.parse_args().arm
    if arm is not None:
        print(json.dumps(_measured(is_kept=arm == "kept")))
        return
    if not (MODEL / "config.json").exists():
        _save()
    runs: dict[str, list[dict[str, float]]] = {"kept": [], "whole": []}
    for _ in range(REPEATS):
        for name, found in runs.items():
            command = [sys.executable, __file__, "--arm", name]
            lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            found.append(json.loads(lines[-1]))
            print(json.dumps({"arm": name, **found[-1]}), flush=True)
    for key in runs["kept"][0]:
        medians = {name: round(statistics.median(run[key] for run in found), 2) for name, found in runs.items()}
        print(json.dumps({"case": key, **medians, "whole / kept": round(medians["whole"] / medians["kept"], 2)}))


def _measured(*, is_kept: bool) -> dict[str, float]:
    start = perf_counter()
    with mock.patch.object(startup, "_keeps_mxfp4", return_value=is_kept):
        engine = start_engine(MODEL, enable_lora=False)
    seconds = perf_counter() - start
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    found = {
        "start, s": round(seconds, 1),
        "largest memory while it starts, GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "memory then but for files, GB": int(status["RssAnon"].split()[0]) / 1e6,
    }
    sampling = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    for num_sequences in NUM_SEQUENCES:
        for i in range(num_sequences):
            prompt = [2 + (7 * i + 11 * k) % 200 for k in range(PROMPT_TOKENS)]
            engine.add_request(EngineRequest(f"{num_sequences}-{i}", prompt, sampling))
        times: list[float] = []
        while engine.has_work():
            start = perf_counter()
            outputs = engine.step()
            if sum(len(output.token_ids) for output in outputs) == num_sequences:
                times.append(1000 * (perf_counter() - start))
        found[f"step, {num_sequences} sequences"] = round(statistics.median(times), 1)
    return found


def _save() -> None:
    config = GptOssConfig(
        num_hidden_layers=6,
        num_local_experts=32,
        vocab_size=32_000,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    torch.manual_seed(0)
    tensors = {}
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, depth, num_outputs = weight.shape
            sizes = num_experts, num_outputs, depth // GROUP
            tensors[f"{name}_blocks"] = torch.randint(256, (*sizes, GROUP // 2), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(sizes, 120, dtype=torch.uint8)
        else:
            value = torch.ones(weight.shape) if "norm" in name else torch.randn(weight.shape) * weight.shape[-1] ** -0.5
            tensors[name] = value.bfloat16()
    MODEL.mkdir(parents=True, exist_ok=True)
    save_file(tensors, MODEL / "model.safetensors", {"format": "pt"})
    stated = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(MODEL)
    (MODEL / "config.json").write_text(json.dumps(stated))


if __name__ == "__main__":
    main()

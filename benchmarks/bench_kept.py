"""Weights kept in four bits beside the same made whole: start, memory and decode steps, each in a process of its own.

Models have random weights: "mxfp4" gpt-oss-20b's shapes and a quarter of its layers, which made whole takes 16 GB to
load, "nf4" those of a Llama with 3 billion weights, as bitsandbytes has them.

Run: python benchmarks/bench_kept.py --model nf4
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
from loraserve_kernels.nf4 import LEVELS
from loraserve_kernels.quantization import NF4_BLOCK
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from loraserve.engine import startup
from loraserve.engine.request import EngineRequest, SamplingParams

OUT = Path("benchmarks/out")
TOKENIZER = Path("loraserve/demo/model")
NUM_SEQUENCES = (1, 4, 16)
PROMPT_TOKENS = 64
STEPS = 24
REPEATS = 2
GROUP = 32


def main() -> None:
    """Prints one JSON line a run of each, then one with medians; times in ms but for the start's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*MODELS], required=True)
    parser.add_argument("--arm", choices=["kept", "whole"], help="one run in this process")
    args = parser.parse_args()
    folder = OUT / f"kept-{args.model}"
    if args.arm is not None:
        print(json.dumps(_measured(folder, is_kept=args.arm == "kept")))
        return
    if not (folder / "config.json").exists():
        _save(folder, *MODELS[args.model]())
    runs: dict[str, list[dict[str, float]]] = {"kept": [], "whole": []}
    for _ in range(REPEATS):
        for name, found in runs.items():
            command = [sys.executable, __file__, "--model", args.model, "--arm", name]
            lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            found.append(json.loads(lines[-1]))
            print(json.dumps({"arm": name, **found[-1]}), flush=True)
    for key in runs["kept"][0]:
        medians = {name: round(statistics.median(run[key] for run in found), 2) for name, found in runs.items()}
        print(json.dumps({"case": key, **medians, "whole / kept": round(medians["whole"] / medians["kept"], 2)}))


def _measured(folder: Path, *, is_kept: bool) -> dict[str, float]:
    start = perf_counter()
    with mock.patch.object(startup, "_keeps_stored", return_value=is_kept):
        engine = start_engine(folder, enable_lora=False)
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


def _gpt_oss() -> tuple[PreTrainedConfig, dict[str, object], dict[str, Tensor]]:
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
    experts = {
        name for name, _ in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    tensors = _whole(model, experts)
    for name in experts:
        num_experts, depth, num_outputs = model.get_parameter(name).shape
        sizes = num_experts, num_outputs, depth // GROUP
        tensors[f"{name}_blocks"] = torch.randint(256, (*sizes, GROUP // 2), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(sizes, 120, dtype=torch.uint8)
    return config, {"quant_method": "mxfp4"}, tensors


def _llama() -> tuple[PreTrainedConfig, dict[str, object], dict[str, Tensor]]:
    config = LlamaConfig(
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=8192,
        vocab_size=32_000,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
    }
    tensors = _whole(model, {f"{name}.weight" for name in linears})
    for name, linear in linears.items():
        shape = linear.out_features, linear.in_features
        state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "bfloat16", "shape": shape}
        codes = torch.randint(256, (shape[0], shape[1] // NF4_BLOCK, NF4_BLOCK // 2), dtype=torch.uint8)
        codes[..., 0] |= 15  # the largest of each block
        tensors |= {
            f"{name}.weight": codes.view(-1, 1),
            f"{name}.weight.absmax": torch.full((codes.numel() * 2 // NF4_BLOCK,), shape[1] ** -0.5),
            f"{name}.weight.quant_map": LEVELS.clone(),
            f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
                [*json.dumps(state).encode()], dtype=torch.uint8
            ),
        }
    return config, {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors


MODELS = {"mxfp4": _gpt_oss, "nf4": _llama}


def _whole(model: PreTrainedModel, others: set[str]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        name: (
            torch.ones(weight.shape) if "norm" in name else torch.randn(weight.shape) * weight.shape[-1] ** -0.5
        ).bfloat16()
        for name, weight in model.named_parameters()
        if name not in others
    }


def _save(folder: Path, config: PreTrainedConfig, quantization: dict[str, object], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": quantization}))


if __name__ == "__main__":
    main()

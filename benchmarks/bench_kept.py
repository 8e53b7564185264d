"""Weights kept in four bits against the same weights dequantized: start, memory, steps and a prompt.

Each run has its own process. Models have random weights and the following shapes. "mxfp4": gpt-oss-20b with a quarter
of its layers; dequantized, it takes 16 GB to load. "nf4", "awq", "gptq": a Llama with 3 billion weights, quantized as
bitsandbytes, AWQ and GPTQ do. "gptq-order": the same with `desc_act`. "awq-experts": Qwen3-30B-A3B with a sixth of its
layers.

Run: python benchmarks/bench_kept.py --model nf4
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
from in_process import start_engine
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
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from loraserve.engine import startup
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.models.packed_weights import NF4_LEVELS

OUT = Path("benchmarks/out")
TOKENIZER = Path("loraserve/demo/model")
NUM_SEQUENCES = (1, 4, 16)
PROMPT_TOKENS = 64
STEPS = 24
LONG_PROMPT = 512
REPEATS = 2
GROUP = 32
AWQ_GROUP = 128
Made = tuple[PreTrainedConfig, dict[str, object], dict[str, Tensor]]
"""(config, its quantization_config, tensors)."""


def main() -> None:
    """Prints one JSON line per run, then one per case with the medians; times in ms, except the start in s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*MODELS], required=True)
    parser.add_argument("--arm", choices=["kept", "whole"], help="do one run, in this process")
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
    prompt = [2 + 3 * k % 200 for k in range(LONG_PROMPT)]
    engine.add_request(EngineRequest("long", prompt, SamplingParams(max_tokens=1, temperature=0.0)))
    start = perf_counter()
    while engine.has_work():
        engine.step()
    found[f"prompt, {LONG_PROMPT} tokens"] = round(1000 * (perf_counter() - start), 1)
    return found


def _gpt_oss() -> Made:
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


def _llama(stated: dict[str, object], pack: Callable[[str, int, int], dict[str, Tensor]]) -> Made:
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
        tensors |= pack(name, linear.out_features, linear.in_features)
    return config, stated, tensors


def _qwen_moe() -> Made:
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        vocab_size=32_000,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    config.head_dim = 128
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    experts = [name for name, module in model.named_modules() if name.endswith("mlp.experts")]
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name and not name.endswith(".gate")
    }
    packed = {f"{name}.weight" for name in linears}
    packed |= {f"{name}.{weight}" for name in experts for weight in ("gate_up_proj", "down_proj")}
    tensors = _whole(model, packed)
    for name, linear in linears.items():
        tensors |= _in_awq(name, linear.out_features, linear.in_features)
    for name in experts:
        for i in range(config.num_experts):
            for linear in ("gate_proj", "up_proj"):
                tensors |= _in_awq(f"{name}.{i}.{linear}", config.moe_intermediate_size, config.hidden_size)
            tensors |= _in_awq(f"{name}.{i}.down_proj", config.hidden_size, config.moe_intermediate_size)
    return config, AWQ, tensors


def _in_nf4(name: str, num_outputs: int, depth: int) -> dict[str, Tensor]:
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "bfloat16", "shape": [num_outputs, depth]}
    codes = torch.randint(256, (num_outputs, depth // NF4_BLOCK, NF4_BLOCK // 2), dtype=torch.uint8)
    return {
        f"{name}.weight": codes.view(-1, 1),
        f"{name}.weight.absmax": torch.full((codes.numel() * 2 // NF4_BLOCK,), depth**-0.5),
        f"{name}.weight.quant_map": NF4_LEVELS.clone(),
        f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }


def _in_awq(name: str, num_outputs: int, depth: int) -> dict[str, Tensor]:
    def words(num_rows: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (num_rows, num_outputs // 8)).int()

    num_groups = depth // AWQ_GROUP
    scales = torch.full((num_groups, num_outputs), depth**-0.5 / 7).half()
    return {f"{name}.qweight": words(depth), f"{name}.qzeros": words(num_groups), f"{name}.scales": scales}


def _in_gptq(name: str, num_outputs: int, depth: int) -> dict[str, Tensor]:
    parts = _in_awq(name, num_outputs, depth)
    parts[f"{name}.qweight"] = parts[f"{name}.qweight"].view(depth // 8, num_outputs)
    return parts


def _in_gptq_order(name: str, num_outputs: int, depth: int) -> dict[str, Tensor]:
    """Linears with equally many inputs get the same order, as linears that share their inputs have."""
    order = torch.randperm(depth, generator=torch.Generator().manual_seed(depth))
    return _in_gptq(name, num_outputs, depth) | {f"{name}.g_idx": (order // AWQ_GROUP).int()}


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": AWQ_GROUP, "version": "gemm", "zero_point": True}
GPTQ: dict[str, object] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": AWQ_GROUP,
    "checkpoint_format": "gptq_v2",
    "desc_act": False,
}
MODELS: dict[str, Callable[[], Made]] = {
    "mxfp4": _gpt_oss,
    "nf4": partial(_llama, NF4, _in_nf4),
    "awq": partial(_llama, AWQ, _in_awq),
    "gptq": partial(_llama, GPTQ, _in_gptq),
    "gptq-order": partial(_llama, GPTQ | {"desc_act": True}, _in_gptq_order),
    "awq-experts": _qwen_moe,
}


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

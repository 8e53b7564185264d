"""Tiny models saved as quantized checkpoints, and the dequantized weights that these stand for, in float32."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, PreTrainedModel

from loraserve.models.packed_weights import NF4_LEVELS
from tests.support.tiny_models import COMMON, WINDOW, random_model, save_model

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP = 32
BLOCK = 32
LARGEST_FLOAT8 = 448
SCHEMES = "W8A8", "W8A16", "W4A16", "W4A16_ASYM", "FP8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"
"""Presets of compressed-tensors."""
WEIGHTS = "model.safetensors"


def gpt_oss() -> PreTrainedModel:
    """Its sizes are multiples of a group."""
    return random_model(
        GptOssConfig(
            **COMMON | {"intermediate_size": 96},
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    )


def llama() -> PreTrainedModel:
    return random_model(LlamaConfig(**COMMON | {"hidden_size": 128, "intermediate_size": 256}, head_dim=32))


def mixtral() -> PreTrainedModel:
    return random_model(
        MixtralConfig(**COMMON | {"intermediate_size": 128}, num_local_experts=4, num_experts_per_tok=2)
    )


def save_mxfp4(folder: Path) -> PreTrainedModel:
    """Experts quantized like gpt-oss's, everything else in full precision."""
    model = gpt_oss()
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight
            continue
        codes, exponents = to_mxfp4(weight.mT)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = exponents[..., 0]
        weight.copy_((FP4[codes.long()] * (exponents.float() - 127).exp2()).flatten(-2).mT)
    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save_model(model, folder)
    write_weights(folder, tensors)
    state(folder, {"quant_method": "mxfp4", "modules_to_not_convert": whole})
    return model


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> codes of `FP4`, uint8 [..., K / 32, 32], and exponents of two plus 127, uint8 [..., K / 32, 1]."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    codes = (groups[..., None] / exponents[..., None].exp2() - FP4).abs().argmin(-1)
    return codes.to(torch.uint8), (exponents + 127).to(torch.uint8)


def save_fp8(folder: Path, model: PreTrainedModel | None = None, is_blockwise: bool = True) -> PreTrainedModel:
    """Blockwise like DeepSeek's and Qwen's; otherwise one scale for each weight, and one for its inputs."""
    model = model or llama()
    save_model(model, folder)
    tensors, whole = read_weights(folder), read_weights(folder)
    for name, weight in whole.items():
        if weight.dim() == 2 and ".layers." in name and ".gate.weight" not in name:
            in_blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            blocks = in_blocks if is_blockwise else weight[None, :, None]
            scales = blocks.abs().amax((1, 3), keepdim=True) / LARGEST_FLOAT8
            multiples = (blocks / scales).to(torch.float8_e4m3fn)
            tensors[name] = multiples.view(weight.shape)
            tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0] if is_blockwise else scales.flatten()[0]
            whole[name] = (multiples.float() * scales).view(weight.shape)
            if not is_blockwise:
                tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.02)
    write_weights(folder, whole)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    stated = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic" if is_blockwise else "static",
        "weight_block_size": [BLOCK, BLOCK] if is_blockwise else None,
    }
    write_weights(folder, tensors)
    state(folder, stated)
    return expected


def save_compressed(folder: Path, scheme: str) -> PreTrainedModel:
    """scheme: one of `SCHEMES`. Imports compressed-tensors here, because a machine with a GPU may lack it."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    model = llama()
    config = QuantizationConfig(
        config_groups={scheme: ["Linear"]}, ignore=["lm_head"], quantization_status=QuantizationStatus.FROZEN
    )
    apply_quantization_config(model, config)
    whole = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            whole[f"{name}.weight"] = _calibrated(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save_model(model, folder)
    compressor.update_config(str(folder))
    expected = llama()
    expected.load_state_dict(whole, strict=False)
    return expected


def _calibrated(linear: nn.Linear) -> Tensor:
    """Sets the scales of its weight; returns the weight as stored, but NVFP4 as it is dequantized, in bfloat16."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight, arguments = linear.weight.data, linear.quantization_scheme.weights
    groups = weight if arguments.group_size is None else weight.unflatten(1, (-1, arguments.group_size))
    least, most = groups.amin(-1), groups.amax(-1)
    of_all = None
    if arguments.strategy == "tensor_group":
        of_all = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        linear.weight_global_scale.data = of_all
    if arguments.strategy == "tensor":
        least, most = least.amin(), most.amax()
    scale, zero_point = calculate_qparams(least, most, arguments, global_scale=of_all)
    linear.weight_scale.data = scale.reshape(linear.weight_scale.shape)
    if hasattr(linear, "input_scale"):
        linear.input_scale.data.fill_(0.02)
    zero_points = getattr(linear, "weight_zero_point", None)
    if zero_points is not None:
        zero_points.data = zero_point.reshape(zero_points.shape).to(zero_points.dtype)
    stored = fake_quantize(weight, linear.weight_scale, zero_points, arguments, global_scale=of_all)
    return stored if of_all is None else stored.bfloat16().float()


ANY_LEVELS = torch.linspace(-1, 1, 16) ** 3
"""Levels other than NF4's: a checkpoint has its own."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def save_gptq(
    folder: Path,
    model: PreTrainedModel | None = None,
    bits: int = 4,
    layout: str = "gptq",
    in_order: bool = True,
    group_size: int = GROUP,
) -> PreTrainedModel:
    """layout: of zero points, which "gptq" stores minus one. in_order: a group's rows are adjacent. group_size: inputs
    per group, -1 = all."""

    def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows = weight.T
        group_of_row = torch.arange(len(rows)) // (group_size if group_size > 0 else len(rows))
        if not in_order:
            group_of_row = group_of_row[torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))]
        codes, scales, zeros = rounded(rows, group_of_row, bits)
        stored_zeros = zeros - 1 if layout == "gptq" else zeros
        tensors = {
            "qweight": in_words(codes, bits, range(32 // bits), 0),
            "qzeros": in_words(stored_zeros, bits, range(32 // bits), 1),
            "scales": scales,
        }
        if not in_order:
            tensors["g_idx"] = group_of_row.int()
        return tensors, ((codes - zeros[group_of_row]) * scales.float()[group_of_row]).T

    stated = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "checkpoint_format": layout}
    return save_packed(folder, model or llama(), packed, stated | {"desc_act": not in_order})


def save_awq(folder: Path, model: PreTrainedModel | None = None, group_size: int = GROUP) -> PreTrainedModel:
    """group_size: inputs per group, -1 = all."""

    def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        group_of_row = torch.arange(weight.shape[1]) // (group_size if group_size > 0 else weight.shape[1])
        codes, scales, zeros = rounded(weight.T, group_of_row, 4)
        tensors = {"qweight": in_words(codes, 4, AWQ_ORDER, 1), "qzeros": in_words(zeros, 4, AWQ_ORDER, 1)}
        return tensors | {"scales": scales}, ((codes - zeros[group_of_row]) * scales.float()[group_of_row]).T

    stated = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return save_packed(folder, model or llama(), packed, stated)


def save_integers(
    folder: Path,
    model: PreTrainedModel | None = None,
    bits: int = 4,
    *,
    is_symmetric: bool = False,
    in_order: bool = True,
    group_size: int = GROUP,
) -> PreTrainedModel:
    """Like compressed-tensors' "pack-quantized", whose own packer `save_compressed` uses."""

    def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        depth = weight.shape[1]
        group_of_row = torch.arange(depth) // (group_size if group_size > 0 else depth)
        if not in_order:
            group_of_row = group_of_row[torch.randperm(depth, generator=torch.Generator().manual_seed(depth))]
        codes, scales, zeros = rounded(weight.T, group_of_row, bits, is_symmetric=is_symmetric)
        tensors = {
            "weight_packed": in_words(codes.T, bits, range(32 // bits), 1),
            "weight_scale": scales.T,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = in_words(zeros, bits, range(32 // bits), 1).T
        if not in_order:
            tensors["weight_g_idx"] = group_of_row.int()
        return tensors, ((codes - zeros[group_of_row]) * scales.float()[group_of_row]).T

    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "group_size": group_size}
    weights |= {"strategy": "group" if group_size > 0 else "channel", "actorder": None if in_order else "group"}
    stated = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "format": "pack-quantized"}
    return save_packed(folder, model or llama(), packed, {"quant_method": "compressed-tensors", **stated})


def save_floats(folder: Path, model: PreTrainedModel | None = None) -> PreTrainedModel:
    """Like compressed-tensors' "mxfp4-pack-quantized", whose own packer `save_compressed` uses."""

    def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, exponents = to_mxfp4(weight)
        tensors = {
            "weight_packed": (codes[..., ::2] | codes[..., 1::2] << 4).flatten(1),
            "weight_scale": exponents[..., 0],
        }
        return tensors, (FP4[codes.long()] * (exponents.float() - 127).exp2()).flatten(1)

    weights = {"num_bits": 4, "type": "float", "group_size": GROUP, "strategy": "group", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    stated = {"quant_method": "compressed-tensors", "config_groups": groups, "format": "mxfp4-pack-quantized"}
    return save_packed(folder, model or llama(), packed, stated)


def rounded(
    rows: Tensor, group_of_row: Tensor, bits: int, *, is_symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], and of each group float16 scales and zero points [G, N]: never 0, or the middle if symmetric."""
    most = 2**bits - 1
    groups = [rows[group_of_row == group] for group in range(int(group_of_row.max()) + 1)]
    spans = torch.stack(
        [2 * group.abs().amax(0) if is_symmetric else group.amax(0) - group.amin(0) for group in groups]
    )
    scales = (spans / most).half()
    least = torch.stack([group.amin(0) for group in groups])
    zeros = (-least / scales.float()).round().clamp(1, most).int()
    if is_symmetric:
        zeros[:] = 2 ** (bits - 1)
    codes = (rows / scales.float()[group_of_row] + zeros[group_of_row]).round().clamp(0, most).int()
    return codes, scales, zeros


def in_words(codes: Tensor, bits: int, order: Sequence[int], axis: int) -> Tensor:
    """Packs `len(order)` codes along the axis into one int32. order: index of the code in each place, lowest first."""
    codes = codes if axis == 1 else codes.T
    words = torch.zeros(codes.shape[0], codes.shape[1] // len(order), dtype=torch.int64)
    for place, of_column in enumerate(order):
        words |= codes[:, of_column :: len(order)].long() << (place * bits)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return words if axis == 1 else words.T


def save_nf4(
    folder: Path,
    model: PreTrainedModel | None = None,
    *,
    is_nested: bool = True,
    levels: Tensor = NF4_LEVELS,
    dtype: str = "bfloat16",
    storage: torch.dtype = torch.uint8,
) -> PreTrainedModel:
    """Like bitsandbytes, with blocks of 64 over all rows. is_nested: also quantize their scales, to eight bits. dtype:
    that dequantized weights are rounded to. storage: dtype that the file states for their bytes."""
    nested_size, offset = 256, 0.25

    def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = weight.reshape(-1, 64)
        largest = blocks.abs().amax(1)
        tensors = {"weight.absmax": largest}
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": dtype, "shape": list(weight.shape)}
        if is_nested:
            table = torch.linspace(-1, 1, 256)
            of_blocks = torch.stack([part.sub(offset).abs().amax() for part in largest.split(nested_size)])
            multiples = (largest - offset) / of_blocks.repeat_interleave(nested_size)[: len(largest)]
            codes = (multiples[:, None] - table).abs().argmin(1)
            largest = table[codes] * of_blocks.repeat_interleave(nested_size)[: len(largest)] + offset
            tensors = {
                "weight.absmax": codes.to(torch.uint8),
                "weight.nested_absmax": of_blocks,
                "weight.nested_quant_map": table,
            }
            state |= {"nested_blocksize": nested_size, "nested_dtype": "float32", "nested_offset": offset}
        # Divided by the block's own largest, so that each block has a level of 1.
        codes = (blocks[..., None] / blocks.abs().amax(1)[:, None, None] - levels).abs().argmin(-1)
        pairs = codes.view(-1, 2)
        tensors |= {
            "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8).flatten().view(storage)[:, None],
            "weight.quant_map": levels.clone(),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
        }
        whole = (levels[codes] * largest[:, None]).to(getattr(torch, dtype))
        return tensors, whole.float().view(weight.shape)

    stated = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return save_packed(folder, model or llama(), packed, stated)


def save_int8(folder: Path) -> PreTrainedModel:
    """Like bitsandbytes: one scale for each row."""

    def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight / largest[:, None] * 127).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * (largest / 127)[:, None]

    return save_packed(folder, llama(), packed, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def save_packed(
    folder: Path,
    model: PreTrainedModel,
    packed: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]],
    stated: dict[str, object],
) -> PreTrainedModel:
    """packed: for the weight of each linear in a layer, except routers', returns the tensors it is stored as, by the
    part of their names after the module's, and the weight that these stand for."""
    save_model(model, folder)
    tensors, whole = read_weights(folder), read_weights(folder)
    for name, weight in read_weights(folder).items():
        if weight.dim() == 2 and ".layers." in name and ".gate.weight" not in name:
            parts, whole[name] = packed(weight)
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    write_weights(folder, whole)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    write_weights(folder, tensors)
    state(folder, stated)
    return expected


def state(folder: Path, stated: dict[str, object]) -> None:
    """Adds to the `quantization_config` of the folder's config."""
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = config.get("quantization_config", {}) | stated
    (folder / "config.json").write_text(json.dumps(config))


def read_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WEIGHTS)


def write_weights(folder: Path, tensors: dict[str, Tensor], file: str = WEIGHTS) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})


SAVES: dict[str, Callable[[Path], PreTrainedModel]] = {
    "mxfp4": save_mxfp4,
    "fp8": save_fp8,
    "fp8-experts": lambda folder: save_fp8(folder, mixtral()),
    "fp8-tensor": partial(save_fp8, is_blockwise=False),
    **{scheme: partial(save_compressed, scheme=scheme) for scheme in SCHEMES},
}
"""By the name of the tested format: each saves a model to a folder, and returns it with its dequantized weights."""

UNPACKED_SAVES: dict[str, Callable[[Path], PreTrainedModel]] = {
    "gptq": save_gptq,
    "gptq-act-order": partial(save_gptq, in_order=False),
    "gptq-v2": partial(save_gptq, layout="gptq_v2", in_order=False),
    "gptq-2": partial(save_gptq, bits=2, layout="gptq_v2"),
    "gptq-8": partial(save_gptq, bits=8),
    "gptq-experts": lambda folder: save_gptq(folder, mixtral()),
    "awq": save_awq,
    "awq-experts": lambda folder: save_awq(folder, mixtral()),
    "nf4": save_nf4,
    "nf4-plain": partial(save_nf4, is_nested=False, dtype="float16"),
    "nf4-in-bfloat16": partial(save_nf4, storage=torch.bfloat16),
    "other-levels": partial(save_nf4, levels=ANY_LEVELS),
    "int8": save_int8,
    "integers": save_integers,
    "integers-8": partial(save_integers, bits=8, is_symmetric=True),
    "integers-act-order": partial(save_integers, in_order=False),
    "integers-experts": lambda folder: save_integers(folder, mixtral(), is_symmetric=True),
    "floats": save_floats,
    "floats-experts": lambda folder: save_floats(folder, mixtral()),
}
"""Likewise, for formats that transformers does not dequantize."""

"""Quantized checkpoints, dequantized as they are loaded, mostly by transformers.

transformers takes even what it does not understand to be weights: float8 without its scales, for example. So anything
uncertain is refused here.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from copy import copy
from importlib.util import find_spec
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from loraserve.models.errors import ModelRefusedError
from loraserve.models.model_files import weight_files
from loraserve.models.unpacked_weights import COMPRESSED, UNPACKED, are_unpacked, unsupported_option

MXFP4, _FP8 = "mxfp4", "fp8"
_PACKAGES = {MXFP4: (), _FP8: ("accelerate",), COMPRESSED: ("accelerate", "compressed_tensors")}
"""Packages that each method needs besides transformers."""
_OF_WEIGHTS = ("scale", "zero_point", "packed", "shape", "blocks", "g_idx")
"""Parts of the names of tensors that are needed to dequantize weights."""
_OF_OTHERS = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale", "output_zero_point"}
    | {f"{each}_{what}" for each in ("q", "k", "v", "kv") for what in ("scale", "zero_point")}
)
"""Tensors for activations and the KV cache, which are not quantized here."""
_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_FEW_BITS = _FLOAT8 | {"I8", "U8"}
_UNQUANTIZED = "use the unquantized weights, which --quantization int8 or int4 quantizes on a CPU while they are loaded"


class StoredTensor(NamedTuple):
    dtype: str
    """Its name in safetensors."""
    shape: tuple[int, ...]


_Modules = dict[str, dict[str, StoredTensor]]
"""By module, tensors by the last part of their names."""


def quantization_method(config: PreTrainedConfig) -> str | None:
    """How the checkpoint's weights are quantized; None = not at all."""
    stored = getattr(config, "quantization_config", None)
    return stored.get("quant_method") if isinstance(stored, dict) else None


def enable_dequantization(model: str, revision: str | None, config: PreTrainedConfig) -> None:
    """Have transformers dequantize the weights as it loads them, to the model's dtype, unless we do: `are_unpacked`.

    Raises `ModelRefusedError`.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None and getattr(config.get_text_config(), "quantization_config", None) is not None:
        raise ModelRefusedError(f"{model} has a quantization_config only for its text model, which is not supported")
    tensors = stored_tensors(model, revision)
    modules = _by_module(tensors)
    if stored is None:
        _require_unquantized(model, modules, tensors)
        return
    method = quantization_method(config)
    if are_unpacked(stored):
        if (unread := unsupported_option(stored)) is not None:
            raise ModelRefusedError(f"{model} cannot be read: its {unread}; {_UNQUANTIZED}")
        return
    if method not in _PACKAGES:
        supported = ", ".join((*_PACKAGES, *UNPACKED))
        raise ModelRefusedError(
            f"{model} is quantized with {method}, which is not supported (supported: {supported}): {_UNQUANTIZED}"
        )
    lacking = [package for package in _PACKAGES[method] if find_spec(package) is None]
    if lacking:
        raise ModelRefusedError(
            f"{model} is quantized with {method}, which needs {lacking[0]}: pip install 'loraserve[quantized]'"
        )
    if (unknown := _unsupported_by_transformers(stored)) is not None:
        raise ModelRefusedError(
            f"{model} cannot be dequantized, because transformers does not support its {unknown}: {_UNQUANTIZED}"
        )
    _require_all_parts(model, modules)
    _require_scales(model, modules, stored.get("weight_block_size") if method == _FP8 else None)
    config.quantization_config = {**stored, "dequantize": True}


def require_dequantizable(model: str, stored: dict[str, Any], *, has_experts: bool) -> None:
    """Raises `ModelRefusedError` if transformers would ignore scales. stored: the model's `quantization_config`."""
    if stored["quant_method"] == COMPRESSED and has_experts and not are_unpacked(stored):
        raise ModelRefusedError(
            f"{model} cannot be dequantized: mixture-of-experts models in compressed-tensors are supported only in "
            f"packed integers or MXFP4; {_UNQUANTIZED}"
        )


def require_all_read(model: str, method: str | None, unread: Collection[str]) -> None:
    """Raises `ModelRefusedError` if a tensor needed to dequantize weights is unread.

    method: from `quantization_method`. unread: names of the checkpoint's tensors that became part of no weight.
    """
    names = [] if method is None else sorted(filter(_is_of_weights, unread))
    if names:
        raise ModelRefusedError(
            f"{model} cannot be dequantized, because transformers does not read {names[0]}: {_UNQUANTIZED}"
        )


def unquantized_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the same model without quantization."""
    unquantized = copy(config)
    delattr(unquantized, "quantization_config")
    return unquantized


def stored_tensors(model: str, revision: str | None) -> dict[str, StoredTensor]:
    """The checkpoint's tensors by name. Raises `ModelRefusedError`."""
    tensors: dict[str, StoredTensor] = {}
    try:
        for path in weight_files(model, revision):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118, an open file is not a mapping
                    part = file.get_slice(name)
                    tensors[name] = StoredTensor(part.get_dtype(), tuple(part.get_shape()))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelRefusedError(f"cannot read the weights of {model}: {error}") from error
    return tensors


def _by_module(tensors: Mapping[str, StoredTensor]) -> _Modules:
    """For modules with quantized weights: those tensors, and the ones needed to dequantize them."""
    modules: _Modules = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if tensor.dtype in _FEW_BITS or _is_of_weights(name):
            modules[module][last] = tensor
    return {
        module: parts
        for module, parts in modules.items()
        if any(part.dtype in _FEW_BITS or last.endswith("_packed") for last, part in parts.items())
    }


def _require_unquantized(model: str, modules: _Modules, tensors: Mapping[str, StoredTensor]) -> None:
    packed = next((name for name in tensors if name.endswith((".qweight", ".weight_packed"))), None)
    if packed is not None:
        raise ModelRefusedError(f"{model} has {packed}, but its config.json has no quantization_config")
    for module, parts in modules.items():
        for last, part in parts.items():
            if part.dtype in _FLOAT8 or (last == "weight" and part.dtype in _FEW_BITS):
                raise ModelRefusedError(
                    f"{model} has {module}.{last} in {part.dtype}, but its config.json has no quantization_config"
                )


def _unsupported_by_transformers(stored: dict[str, Any]) -> str | None:
    schemes = stored.get("config_groups") or {}
    if not isinstance(schemes, dict):
        return f"config_groups ({schemes!r})"
    if len(schemes) > 1:
        return f"{len(schemes)} schemes ({', '.join(schemes)})"
    if stored.get("transform_config"):
        return "transform_config"
    sparsity = stored.get("sparsity_config") or {}
    kind = sparsity.get("format", "dense") if isinstance(sparsity, dict) else repr(sparsity)
    return None if kind == "dense" else f"sparsity_config ({kind})"


def _require_all_parts(model: str, modules: _Modules) -> None:
    """A module must have the same tensors in all layers."""
    of_kind: dict[str, set[str]] = defaultdict(set)
    for module, parts in modules.items():
        of_kind[module.rpartition(".")[2]] |= parts.keys()
    for module, parts in modules.items():
        expected = of_kind[module.rpartition(".")[2]]
        if not any("scale" in last for last in expected):
            expected = expected | {"weight_scale"}
        if parts.keys() != expected:
            raise ModelRefusedError(f"{model} cannot be dequantized: it lacks {module}.{min(expected - parts.keys())}")


def _require_scales(model: str, modules: _Modules, block_size: list[int] | None) -> None:
    """block_size: [rows, columns] of float8 blocks. transformers ignores it and goes by the number of scales."""
    for module, parts in modules.items():
        scale = parts.get("weight_scale")
        if scale is not None and scale.dtype in _FLOAT8 and "weight_global_scale" not in parts:
            raise ModelRefusedError(f"{model} cannot be dequantized: it lacks {module}.weight_global_scale")
        weight, scales = parts.get("weight"), parts.get("weight_scale_inv")
        if block_size is None or weight is None or scales is None:
            continue
        expected = tuple(size / block for size, block in zip(weight.shape[-2:], block_size, strict=True))
        if scales.shape[-2:] != expected:
            raise ModelRefusedError(
                f"{model} cannot be dequantized: {module}.weight has shape {list(weight.shape)} in blocks of "
                f"{block_size}, but its scales have shape {list(scales.shape)}"
            )


def _is_of_weights(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last not in _OF_OTHERS and any(word in last for word in _OF_WEIGHTS)

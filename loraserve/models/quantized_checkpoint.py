"""Checkpoints whose weights are stored in fewer bits, which transformers makes whole again as it loads them."""

import json
from collections import defaultdict
from collections.abc import Iterator
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from loraserve.models.errors import ModelRefusedError

_PACKAGES = {"mxfp4": (), "fp8": ("accelerate",), "compressed-tensors": ("accelerate", "compressed_tensors")}
"""What each method needs beside transformers."""
_OF_WEIGHTS = ("scale", "zero_point", "packed", "shape", "blocks", "g_idx")
"""In the names of tensors without which weights cannot be made whole."""
_OF_OTHERS = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "activation_scale", "q_scale", "k_scale", "v_scale"}
)
"""Of activations and the KV cache, which are not quantized here."""
_FEW_BITS = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8"})


def quantization_method(config: PreTrainedConfig) -> str | None:
    """How the checkpoint's weights are stored; None = whole."""
    stored = getattr(config, "quantization_config", None)
    return None if stored is None else str(stored.get("quant_method"))


def make_whole(model: str, revision: str | None, config: PreTrainedConfig) -> None:
    """Have transformers load its weights so, in the dtype that the model is loaded in. Raises `ModelRefusedError`."""
    method = quantization_method(config)
    if method is None:
        return
    if method not in _PACKAGES:
        raise ModelRefusedError(
            f"{model} is quantized with {method}, which is not supported: {', '.join(_PACKAGES)} are; or give the "
            "unquantized weights, which --quantization int8 or int4 rounds on a CPU as they are loaded"
        )
    lacking = [package for package in _PACKAGES[method] if find_spec(package) is None]
    if lacking:
        raise ModelRefusedError(
            f"{model} is quantized with {method}, which needs {lacking[0]}: pip install 'loraserve[quantized]'"
        )
    stored: dict[str, Any] = config.quantization_config
    if (unknown := _what_is_not_undone(stored)) is not None:
        raise ModelRefusedError(
            f"{model} cannot be made whole, as transformers does not undo its {unknown}: give the unquantized weights"
        )
    _require_all_parts(model, revision)
    config.quantization_config = {**stored, "dequantize": True}


def whole_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Of the same model, were it not quantized."""
    whole = copy(config)
    delattr(whole, "quantization_config")
    return whole


def require_all_read(model: str, config: PreTrainedConfig, unread: set[str]) -> None:
    """unread: names of the checkpoint's tensors that no weight was made of. Raises `ModelRefusedError`."""
    names = [] if quantization_method(config) is None else sorted(filter(_is_of_weights, unread))
    if names:
        raise ModelRefusedError(
            f"{model} cannot be made whole, as transformers does not read {names[0]}: give the unquantized weights"
        )


def _what_is_not_undone(stored: dict[str, Any]) -> str | None:
    schemes = stored.get("config_groups") or {}
    if len(schemes) > 1:
        return f"{len(schemes)} schemes ({', '.join(schemes)})"
    if stored.get("transform_config"):
        return "transform_config"
    sparsity = (stored.get("sparsity_config") or {}).get("format", "dense")
    return None if sparsity == "dense" else f"sparsity_config ({sparsity})"


def _require_all_parts(model: str, revision: str | None) -> None:
    """transformers takes weights that have lost their scales for whole ones."""
    parts = _parts_of_modules(model, revision)
    of_kind: dict[str, set[str]] = defaultdict(set)  # of modules that have the same name in all layers
    for module, names in parts.items():
        of_kind[module.rpartition(".")[2]] |= names
    for module, names in parts.items():
        expected = of_kind[module.rpartition(".")[2]]
        if not any("scale" in name for name in expected):
            expected = expected | {"weight_scale"}
        if names != expected:
            raise ModelRefusedError(f"{model} cannot be made whole: it lacks {module}.{min(expected - names)}")


def _parts_of_modules(model: str, revision: str | None) -> dict[str, set[str]]:
    """Names of tensors by module, of modules whose weights are in fewer bits."""
    parts: dict[str, set[str]] = defaultdict(set)
    try:
        for path in weight_files(model, revision):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118, a file is no mapping
                    module, _, last = name.rpartition(".")
                    if _is_of_weights(name) or file.get_slice(name).get_dtype() in _FEW_BITS:
                        parts[module].add(last)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelRefusedError(f"cannot read the weights of {model}: {error}") from error
    return parts


def weight_files(model: str, revision: str | None) -> Iterator[str]:
    """Paths of its safetensors. Raises nothing where there are none: transformers says what is lacking."""

    def find(name: str) -> str | None:
        return cached_file(
            model,
            name,
            revision=revision,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )

    index = find("model.safetensors.index.json")
    names = ["model.safetensors"] if index is None else set(json.loads(Path(index).read_bytes())["weight_map"].values())
    return filter(None, map(find, sorted(names)))


def _is_of_weights(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last not in _OF_OTHERS and any(word in last for word in _OF_WEIGHTS)

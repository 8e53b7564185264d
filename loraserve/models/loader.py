"""Loads a transformers model from a directory of safetensors, or builds one from only a config."""

import json
from collections.abc import Callable, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from loraserve_kernels.backend import Backend
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from loraserve.models.cpu_features import has_fast_bfloat16
from loraserve.models.errors import ModelRefusedError
from loraserve.models.experts import is_experts
from loraserve.models.model_class import auto_class
from loraserve.models.model_files import find_file
from loraserve.models.model_place import not_found, why_absent
from loraserve.models.quantized_checkpoint import (
    enable_dequantization,
    quantization_method,
    require_all_read,
    require_dequantizable,
    unquantized_config,
)
from loraserve.models.recurrent import computes_recurrence
from loraserve.models.stored_weights import StoredWeights, find_stored, name_to_load, read_others
from loraserve.models.unpacked_weights import are_unpacked, read_dequantized

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedModel(NamedTuple):
    model: PreTrainedModel
    is_headless: bool
    """It was saved without an `lm_head`, as embedding models are: the token embedding stands in for it."""


def load_config(model: str, revision: str | None) -> PreTrainedConfig:
    """Raises `ModelRefusedError`. Code from the model's directory is never run."""
    absent = why_absent(model, revision)
    if absent is not None:
        raise ModelRefusedError(absent)
    try:
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ImportError, StrictDataclassError) as error:
        if not Path(model).is_dir():
            raise ModelRefusedError(not_found(model)) from error
        raise ModelRefusedError(f"cannot read the config of {model}: {_first_line(error)}") from error
    auto_class(config)  # refuses other kinds of models
    enable_dequantization(model, revision, config)
    return config


def choose_dtype(requested: str, config: PreTrainedConfig, device: torch.device, backend: Backend) -> torch.dtype:
    """ "auto": the checkpoint's dtype; on a CPU bfloat16 instead of float16, and float32 if bfloat16 would be slow.

    Our own linears are at least as fast in bfloat16 as in float32 on any CPU; torch's are only if the CPU has bfloat16
    instructions.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise ModelRefusedError(f"dtype {requested!r} is not supported: choose auto, {', '.join(DTYPES)}")
        return DTYPES[requested]
    # Checkpoints with image towers often state it for the whole model alone.
    stored = getattr(config.get_text_config(), "dtype", None) or config.dtype or torch.float32
    if isinstance(stored, str):
        stored = DTYPES.get(stored, torch.float32)
    if stored == torch.float32 or device.type != "cpu":
        return stored
    is_fast = has_fast_bfloat16() or (backend.packs(torch.bfloat16) and _is_mostly(config, _is_packed))
    return torch.bfloat16 if is_fast else torch.float32


def is_mostly_linears(config: PreTrainedConfig) -> bool:
    """Whether nine tenths of the weights are linears' and embeddings', which every row reads, and not experts'."""
    return _is_mostly(config, _is_linear)


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether the model has layers with a recurrent state."""
    return any(map(computes_recurrence, _without_weights(config).modules()))


def stored_weights(model: str, revision: str | None, config: PreTrainedConfig, dtype: torch.dtype) -> StoredWeights:
    """Weights that can stay in a four-bit form that we have too. config: from `load_config`. dtype: the model's.

    Raises `ModelRefusedError`.
    """
    if quantization_method(config) is None:
        return {}
    return find_stored(model, revision, config.quantization_config, _without_weights(config, dtype), dtype)


def num_weight_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights of the model in that dtype."""
    return sum(parameter.nbytes for parameter in _without_weights(config, dtype).parameters())


def _without_weights(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    try:
        with torch.device("meta"), no_init_weights():
            return auto_class(config).from_config(config, dtype=dtype)
    except ImportError as error:
        raise ModelRefusedError(f"model_type {config.model_type!r} cannot be served: {_first_line(error)}") from error


def _is_mostly(config: PreTrainedConfig, is_wanted: Callable[[nn.Module], bool]) -> bool:
    """Whether nine tenths of the model's weights belong directly to modules that `is_wanted` accepts."""
    model = _without_weights(config)
    weights = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if is_wanted(module)
        for parameter in module.parameters(recurse=False)
    }
    return sum(weights.values()) >= 0.9 * sum(parameter.numel() for parameter in model.parameters())


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def _is_packed(module: nn.Module) -> bool:
    return _is_linear(module) or is_experts(module)


def load_model(
    model: str,
    revision: str | None,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    stored: StoredWeights = MappingProxyType({}),
) -> LoadedModel:
    """Load safetensors weights; pickled weights are never read.

    Raises `ModelRefusedError`, also if weights are missing: transformers would make up values for them. config: from
    `load_config`. stored: from `stored_weights`, on a CPU only; these are not dequantized.
    """
    method = quantization_method(config)
    model_class: Any = auto_class(config)
    source: dict[str, Any] = {"revision": revision, "config": config}
    if method is not None:
        bare = _without_weights(config)
        stated = config.quantization_config
        require_dequantizable(model, stated, has_experts=any(map(is_experts, bare.modules())))
        tensors = None
        if stored:
            tensors = read_others(model, revision, stated, dtype, stored)
        elif are_unpacked(stated):
            tensors = read_dequantized(model, revision, stated, dtype)
        if tensors is not None:
            model_class = type(bare)
            source = {"config": unquantized_config(config), "state_dict": tensors}
    try:
        found = model_class.from_pretrained(
            None if "state_dict" in source else model,
            **source,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, TypeError, AttributeError, KeyError, ImportError) as error:
        raise ModelRefusedError(f"cannot load the weights of {model}: {_first_line(error)}") from error
    loaded, info = found
    require_all_read(model, method, info["unexpected_keys"])
    for name, weight in stored.items():
        loaded_as = name_to_load(name, weight)
        given: Tensor = source["state_dict"][loaded_as]
        if loaded.get_parameter(name).data_ptr() != given.data_ptr():
            raise ModelRefusedError(f"{model} has {loaded_as} in four bits, but transformers did not load it as {name}")
    missing = sorted(info["missing_keys"])
    if missing and not _is_head(missing, loaded):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelRefusedError(
            f"the weights of {model} lack {missing[0]}{more}: the checkpoint must have all weights of the causal model"
        )
    if missing:
        loaded.get_output_embeddings().weight = loaded.get_input_embeddings().weight
    # Via the CPU, where the weights are mapped from the file: transformers loads to a device only with accelerate.
    nn.Module.to(loaded, device)
    return LoadedModel(loaded.eval(), bool(missing))


def _is_head(names: list[str], model: PreTrainedModel) -> bool:
    """Whether these names are exactly the `lm_head`, and the token embedding can stand in for it."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or head.weight.shape != table.weight.shape:
        return False
    heads = [name for name, weight in model.named_parameters(remove_duplicate=False) if weight is head.weight]
    return names == heads


def dummy_model(config: PreTrainedConfig, dtype: torch.dtype, seed: int, device: torch.device = CPU) -> PreTrainedModel:
    """Random weights of the config's shapes, the same for the same seed and kind of device."""
    torch.manual_seed(seed)
    with device:
        return auto_class(config).from_config(config, dtype=dtype, attn_implementation="eager").eval()


def load_tokenizer(model: str, revision: str | None) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelRefusedError(
            f"{model} has no tokenizer that can be loaded: save one beside the model or give --tokenizer"
        ) from error
    if not tokenizer.is_fast:
        raise ModelRefusedError(f"{type(tokenizer).__name__} of {model} has no fast version (tokenizer.json)")
    return tokenizer


def load_processor_template(model: str, revision: str | None) -> str | None:
    """The chat template that checkpoints with image towers may have beside the tokenizer, for their processor."""
    content = load_json(model, "chat_template.json", revision)
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else None


def tokenizer_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer as it behaves once loaded; the tokenizer.json it was read from may differ."""
    backend: Any = tokenizer.backend_tokenizer
    return backend.to_str()


def without_gaps(tokenizer_json: str, token_ids: Set[int]) -> str:
    """Adds a special token, which occurs in no text, for each id that `token_ids` lacks below its largest.

    llguidance only knows ids below the number of tokens.
    """
    missing = set(range(max(token_ids))) - token_ids
    if not missing:
        return tokenizer_json
    tokenizer = json.loads(tokenizer_json)
    if not isinstance(tokenizer["model"]["vocab"], dict):
        return tokenizer_json  # a list, in which a text may occur twice
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": token_id, "content": f"<|no token {token_id}|>", **flags} for token_id in sorted(missing)]
    tokenizer["model"]["vocab"] |= {token["content"]: token["id"] for token in added}
    tokenizer["added_tokens"] += added
    return json.dumps(tokenizer)


def load_generation_config(model: str, revision: str | None) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(model, revision=revision or "main")
    except OSError:
        return None


def load_json(model: str, name: str, revision: str | None) -> Any:
    """The content of a file beside a model; False if it cannot be read, None if there is no such file."""
    path = find_file(model, name, revision)
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return False


def _first_line(error: Exception) -> str:
    """transformers' messages go on for paragraphs."""
    return str(error).strip().partition("\n")[0]

"""Strict reading of PEFT's `adapter_config.json`: every field is honoured, has no effect, or is refused by name.

The fields are those of `LoraConfig` in PEFT 0.21, older PEFT's included. Nothing in it is ever imported or evaluated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from loraserve_adapters.errors import AdapterError, shown
from loraserve_adapters.files import open_regular, read_exactly
from loraserve_adapters.limits import DEFAULT_LIMITS, Limits
from loraserve_adapters.strict_json import parse_object

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What the config says about the computation, with PEFT's defaults filled in."""

    lora_rank: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    """Names or dotted suffixes of names; a string is a pattern for the whole name, or `ALL_LINEAR`."""
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...]
    """Empty = all layers."""
    layers_pattern: tuple[str, ...]
    rank_pattern: tuple[tuple[str, int], ...]
    """In the file's order: the first pattern that matches a module wins."""
    alpha_pattern: tuple[tuple[str, float], ...]
    base_model_name: str | None = None
    """As the author wrote it; never trusted, never opened."""
    peft_version: str | None = None


def read_config(folder: Path, limits: Limits = DEFAULT_LIMITS) -> AdapterConfig:
    """The folder's `adapter_config.json`. Raises only `AdapterError`; reads at most `limits.max_config_bytes`."""
    with open_regular(folder, CONFIG_NAME, limits) as (descriptor, size):
        if size > limits.max_config_bytes:
            raise _refused("too_large", f"{size} bytes, at most {limits.max_config_bytes} are accepted")
        data = bytearray(size)
        read_exactly(descriptor, memoryview(data), 0, CONFIG_NAME)
    return parse_config(bytes(data), limits)


def parse_config(data: bytes, limits: Limits = DEFAULT_LIMITS) -> AdapterConfig:
    """Raises only `AdapterError`."""
    if len(data) > limits.max_config_bytes:
        raise _refused("too_large", f"{len(data)} bytes, at most {limits.max_config_bytes} are accepted")
    fields = parse_object(data, file=CONFIG_NAME, code="bad_json", max_nesting=limits.max_json_nesting)
    if fields.get("peft_type") != "LORA":
        raise _refused("unsupported_option", f'found {shown(fields.get("peft_type"))}, expected "LORA"', "peft_type")
    for name, value in fields.items():
        if name in _HONOURED:
            continue
        if name in _WITHOUT_EFFECT:
            _check_type(name, value, _WITHOUT_EFFECT[name])
        elif name in _NEUTRAL:
            _check_neutral(name, value)
        else:
            raise _refused("unknown_field", "is not a field of PEFT's LoraConfig that loraserve knows", name)
    _check_init(fields.get("init_lora_weights", True))
    return _build(fields, limits)


def _build(fields: dict[str, Any], limits: Limits) -> AdapterConfig:
    config = AdapterConfig(
        lora_rank=_rank("r", fields.get("r", 8), limits),
        lora_alpha=_alpha("lora_alpha", fields.get("lora_alpha", 8)),
        use_rslora=_flag("use_rslora", fields.get("use_rslora")),
        target_modules=_names("target_modules", fields.get("target_modules"), limits),
        exclude_modules=_names("exclude_modules", fields.get("exclude_modules") or [], limits),
        layers_to_transform=_layers(fields.get("layers_to_transform")),
        layers_pattern=_layers_pattern(fields.get("layers_pattern"), limits),
        rank_pattern=_pattern_table("rank_pattern", fields.get("rank_pattern"), limits, _rank_of(limits)),
        alpha_pattern=_pattern_table("alpha_pattern", fields.get("alpha_pattern"), limits, _alpha),
        base_model_name=fields.get("base_model_name_or_path"),
        peft_version=fields.get("peft_version"),
    )
    if len(config.rank_pattern) + len(config.alpha_pattern) > limits.max_patterns:
        raise _refused("too_large", f"more than {limits.max_patterns} patterns", "rank_pattern")
    if isinstance(config.target_modules, str):
        for name in ("layers_to_transform", "layers_pattern"):
            if fields.get(name) is not None:
                raise _refused("invalid_field", "cannot be combined with a target_modules that is a string", name)
    elif config.layers_pattern and fields.get("layers_to_transform") is None:
        raise _refused("invalid_field", "has no meaning without layers_to_transform", "layers_pattern")
    if isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR:
        return replace(config, target_modules=ALL_LINEAR)
    return config


_HONOURED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
    }
)

_WITHOUT_EFFECT: dict[str, tuple[type, ...]] = {
    # Training only.
    "lora_dropout": (int, float),
    "inference_mode": (bool,),
    # How training started; matter only where init_lora_weights names them, and then that is refused.
    "loftq_config": (dict,),
    "eva_config": (dict,),
    "corda_config": (dict,),
    "lora_ga_config": (dict,),
    # Used only with use_qalora or megatron_config, which are refused.
    "qalora_group_size": (int,),
    "megatron_core": (str,),
    # Where the adapter comes from. `auto_mapping` names a module to import: never done here.
    "base_model_name_or_path": (str,),
    "revision": (str,),
    "auto_mapping": (dict,),
    "peft_version": (str,),
}
"""Accepted with any value of these types or null."""

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "task_type": ((None, "CAUSAL_LM"), "only causal language models are served"),
    "bias": (("none",), "adapters that train biases are not supported"),
    "fan_in_fan_out": ((False, None), "transposed weights (Conv1D, as in GPT-2) are not supported"),
    "modules_to_save": ((None, []), "fully trained modules would replace parts of the shared base model"),
    "use_dora": ((False, None), "DoRA is not supported"),
    "lora_bias": ((False, None), "a bias on lora_B is not supported"),
    "use_qalora": ((False, None), "QA-LoRA is not supported"),
    "use_bdlora": ((None, False), "block-diagonal LoRA is not supported"),
    "velora_config": ((None,), "VeLoRA is not supported"),
    "kasa_config": ((None,), "KaSA changes the base weights"),
    "monteclora_config": ((None,), "Monte Carlo LoRA is not supported"),
    "arrow_config": ((None,), "Arrow routing is not supported"),
    "alora_invocation_tokens": ((None,), "activated LoRA is not supported"),
    "trainable_token_indices": ((None,), "trained token embeddings are not supported"),
    "target_parameters": ((None, []), "LoRA on bare parameters is not supported"),
    "layer_replication": ((None, []), "replicated layers would change the shared base model"),
    "ensure_weight_tying": ((False, None), "tied adapters are not supported"),
    "megatron_config": ((None,), "Megatron layers are not supported"),
    "runtime_config": ((None, {}, {"ephemeral_gpu_offload": False}), "PEFT never saves it"),
    # Written by PEFT before 0.3.
    "enable_lora": ((None,), "merged linears of PEFT before 0.3 are not supported"),
    "merge_weights": ((False, None), "merged weights of PEFT before 0.3 are not supported"),
}
"""Accepted with these values only, which change nothing; the text says why any other is refused."""

_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""How A and B started; the base weights stay as they are (MiCA only freezes B: its forward is plain LoRA)."""

_INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _check_init(value: Any) -> None:
    if any(_same(value, plain) for plain in _PLAIN_INITS):
        return
    name = "init_lora_weights"
    if isinstance(value, str) and value.lower().startswith(_INITS_THAT_CHANGE_THE_BASE):
        raise _refused(
            "unsupported_option",
            f"{shown(value)} changes the base weights when the adapter is loaded; convert it to plain LoRA by saving "
            "with PEFT's path_initial_model_for_weight_conversion",
            name,
        )
    raise _refused("unsupported_option", f"{shown(value)} is not supported", name)


def _check_type(name: str, value: Any, types: tuple[type, ...]) -> None:
    if value is not None and type(value) not in types:
        expected = " or ".join(accepted.__name__ for accepted in types)
        raise _refused("invalid_field", f"found {shown(value)}, expected {expected} or null", name)


def _check_neutral(name: str, value: Any) -> None:
    neutral, why = _NEUTRAL[name]
    if not any(_same(value, accepted) for accepted in neutral):
        raise _refused("unsupported_option", f"found {shown(value)}, expected {shown(neutral[0])}: {why}", name)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _rank(name: str, value: Any, limits: Limits) -> int:
    if type(value) is not int or value < 1:
        raise _refused("invalid_field", f"found {shown(value)}, expected a positive integer", name)
    if value > limits.max_lora_rank:
        raise _refused("rank_too_large", f"found {shown(value)}, at most {limits.max_lora_rank} is accepted", name)
    return value


def _rank_of(limits: Limits) -> Callable[[str, Any], int]:
    return lambda name, value: _rank(name, value, limits)


def _alpha(name: str, value: Any) -> float:
    # Beyond 1e30 the scaling would leave float32.
    if type(value) not in (int, float) or not abs(value) <= 1e30:
        raise _refused("invalid_field", f"found {shown(value)}, expected a finite number", name)
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if value is not None and type(value) is not bool:
        raise _refused("invalid_field", f"found {shown(value)}, expected true or false", name)
    return bool(value)


def _names(name: str, value: Any, limits: Limits) -> tuple[str, ...] | str:
    """Lists are sets in PEFT, so they come back sorted and without repeats."""
    if isinstance(value, str):
        return _checked_length(name, value, limits)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _refused("invalid_field", f"found {shown(value)}, expected a list of names or a pattern", name)
    if name == "target_modules" and not value:
        raise _refused("invalid_field", "found [], expected at least one module", name)
    return tuple(sorted({_checked_length(name, item, limits) for item in value}))


def _checked_length(name: str, pattern: str, limits: Limits) -> str:
    if len(pattern) > limits.max_pattern_length:
        raise _refused(
            "too_large", f"a pattern of {len(pattern)} characters, at most {limits.max_pattern_length}", name
        )
    return pattern


def _layers(value: Any) -> tuple[int, ...]:
    numbers = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(number) is int and 0 <= number < 1_000_000 for number in numbers):
        raise _refused("invalid_field", f"found {shown(value)}, expected layer numbers", "layers_to_transform")
    return tuple(sorted(set(numbers)))


def _layers_pattern(value: Any, limits: Limits) -> tuple[str, ...]:
    patterns = [] if value is None or value == "" else [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise _refused("invalid_field", f"found {shown(value)}, expected names such as layers", "layers_pattern")
    return tuple(_checked_length("layers_pattern", item, limits) for item in patterns)


def _pattern_table(name: str, value: Any, limits: Limits, parse: Callable[[str, Any], T]) -> tuple[tuple[str, T], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _refused("invalid_field", f"found {shown(value)}, expected an object", name)
    return tuple(
        (_checked_length(name, pattern, limits), parse(f"{name}.{pattern}", item)) for pattern, item in value.items()
    )


def _refused(code: str, reason: str, field: str | None = None) -> AdapterError:
    where = CONFIG_NAME if field is None else f"{CONFIG_NAME}: {_shown_field(field)}"
    return AdapterError(code, f"{where}: {reason}", file=CONFIG_NAME, key=field)


def _shown_field(field: str) -> str:
    return field if field.isidentifier() and field.isascii() and len(field) < 64 else shown(field)

"""Why a tensor that no targeted module takes is refused, and what to do about it."""

from collections.abc import Collection, Mapping

from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.config_values import SEQ_CLS
from loraserve_adapters.errors import AdapterError, shown, shown_name
from loraserve_adapters.headless import body_name
from loraserve_adapters.other_class import names_other_class
from loraserve_adapters.safetensors_file import TensorEntry
from loraserve_adapters.source_module import BIAS, HEAD_WEIGHT, KEY_PREFIX, MAGNITUDE, OF_EMBEDDINGS
from loraserve_adapters.targets import close_names
from loraserve_adapters.tensor_checks import refused
from loraserve_adapters.trained_tokens import FIELD, ROWS

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch.compile, FSDP and activation checkpointing add, each before the module that it wraps."""
_AS_PEFT_NAMES = "Save the adapter with PEFT's save_pretrained, or rename its tensors"


def unexpected_tensor(
    entry: TensorEntry,
    known: Mapping[str, tuple[str, ...]],
    of_linears: tuple[str, ...],
    layout: BaseLayout,
    *,
    with_hint: bool,
) -> AdapterError:
    """known: by module, the tensor names that PEFT gives it. of_linears: those of linears under this config."""
    name = entry.name
    if not name.startswith(KEY_PREFIX):
        reason, remedy = f"expected a name that starts with {KEY_PREFIX}", f"{_AS_PEFT_NAMES} as that names them."
        return refused("unexpected_tensor", name, reason, remedy=remedy)
    module, _, kind = name.removeprefix(KEY_PREFIX).partition(".lora_")
    kind = f"lora_{kind}" if kind else ""
    if kind.startswith("lora_embedding_") and module in layout.embedding_modules:
        return refused("unsupported_module", name, f"LoRA on this embedding is not supported: {shown(module)}")
    if kind == BIAS and module in known and kind not in of_linears:
        return refused("unexpected_tensor", name, "is a bias, though adapter_config.json does not set lora_bias")
    if kind.startswith(MAGNITUDE) and MAGNITUDE not in of_linears:
        return refused("unexpected_tensor", name, "belongs to DoRA, though adapter_config.json does not set use_dora")
    if name.endswith(f".{ROWS}"):
        reason = f"holds rows of tokens, but {FIELD} of adapter_config.json does not cover this module"
        return refused("unexpected_tensor", name, reason)
    if name == HEAD_WEIGHT:
        reason = f"is the head of a classifier, though task_type of adapter_config.json is not {SEQ_CLS}"
        return refused("unexpected_tensor", name, reason)
    if not kind:
        if name_in_base(name) in {f"{embedding}.weight" for embedding in layout.embedding_modules}:
            reason = "this embedding cannot be replaced; save with save_embedding_layers=False if it is unchanged"
            return refused("unexpected_tensor", name, reason)
        if name.endswith(".bias"):
            reason = "is a bias of the base model; adapters that train biases are not supported"
            return refused("unexpected_tensor", name, reason, remedy='Train the adapter with "bias": "none".')
        return refused("unexpected_tensor", name, "is neither a LoRA tensor nor a base weight that can be checked")
    if kind not in (*of_linears, *OF_EMBEDDINGS):
        expected = " and ".join(known.get(module, of_linears))
        hint = f"PEFT's save_pretrained writes {expected} without an adapter name"
        remedy = f"{_AS_PEFT_NAMES} without it." if _has_adapter_name(kind, (*of_linears, *OF_EMBEDDINGS)) else None
        return refused("unexpected_tensor", name, f"found {shown(kind)}; {hint}", remedy=remedy)
    if module in known and kind not in known[module]:
        return refused("unexpected_tensor", name, f"found {kind}, expected {' or '.join(known[module])}")
    if module in known:
        return refused("unexpected_tensor", name, "its module is not targeted by adapter_config.json")
    if f"{body_name(layout)}.{module}" in known:
        return _without_body(name, layout)
    wrappers = [part for part in _WRAPPERS if part in module.split(".")]
    if wrappers and ".".join(part for part in module.split(".") if part not in _WRAPPERS) in known:
        listed = " and ".join(wrappers)
        reason = f"{listed} names what training wrapped the model in (torch.compile, FSDP), not a part of the model"
        return refused("unknown_module", name, reason, remedy=f"{_AS_PEFT_NAMES} without {listed}.")
    own_name = _name_in_served_class(module, kind, entry, layout) if with_hint else None
    if own_name is not None:
        return _of_other_class(name, module, own_name, layout)
    hint = close_names(module, layout) if with_hint else ""
    what = "embedding" if kind in OF_EMBEDDINGS else "linear"
    return refused("unknown_module", name, f"{layout.shown_as} has no such {what}{hint}")


def _has_adapter_name(kind: str, expected: Collection[str]) -> bool:
    """Whether it is an expected one with an adapter's name in it, such as `lora_A.default.weight`."""
    parts = kind.split(".")
    return any(".".join(parts[:index] + parts[index + 1 :]) in expected for index in range(1, len(parts)))


def _name_in_served_class(module: str, kind: str, entry: TensorEntry, layout: BaseLayout) -> str | None:
    """The base's name for the linear of the same layer, name and size, if that is below another prefix."""
    _, layers, tail = module.rpartition("layers.")
    linears = (known for group in layout.groups for known in group)
    found = [known for known in linears if known.name.endswith(f".{layers}{tail}")]
    if not layers or len(found) != 1 or len(entry.shape) != (1 if kind in (BIAS, MAGNITUDE) else 2):
        return None
    is_a = kind == "lora_A.weight"
    is_of_its_size = entry.shape[is_a] == (found[0].in_features if is_a else found[0].out_features)
    return found[0].name if is_of_its_size else None


def _of_other_class(tensor: str, module: str, own_name: str, layout: BaseLayout) -> AdapterError:
    tail = "layers." + module.rpartition("layers.")[2]
    prefix, own_prefix = (f"{KEY_PREFIX}{name.removesuffix(tail)}" for name in (module, own_name))
    reason = (
        f"the base model has no such linear; its own is called {own_name}, as happens if the adapter was trained on "
        "another class of the model, such as the text-only one"
    )
    if names_other_class([tensor], layout):
        reason += ": then all tensors must have names of that class"
    remedy = f"Train the class that is served, or change {shown_name(prefix)} to {own_prefix} in the tensors' names."
    return refused("unknown_module", tensor, reason, remedy=remedy)


def _without_body(tensor: str, layout: BaseLayout) -> AdapterError:
    body = f"{KEY_PREFIX}{body_name(layout)}."
    reason = (
        f"names without {body_name(layout)}. are those of the model without its head (AutoModel): then all tensors "
        "must have such names, and task_type must be FEATURE_EXTRACTION or null"
    )
    remedy = f"Set task_type to FEATURE_EXTRACTION if all names are like this one; else change {KEY_PREFIX} to {body}"
    return refused("unknown_module", tensor, reason, remedy=f"{remedy} in them.")


def name_in_base(tensor_name: str) -> str | None:
    """PEFT saves the weight of a targeted `lm_head` or embedding as `….base_layer.weight`, that of one with trained
    tokens as `….token_adapter.base_layer.weight`, that of one with an own table as `….original_module.weight`, that of
    others as `….weight`; a bias likewise."""
    if not tensor_name.startswith(KEY_PREFIX):
        return None
    owner, _, kind = tensor_name.removeprefix(KEY_PREFIX).rpartition(".")
    return f"{owner.removesuffix('.original_module').removesuffix('.base_layer').removesuffix('.token_adapter')}.{kind}"

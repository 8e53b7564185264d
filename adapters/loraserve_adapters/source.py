"""Reads a PEFT adapter folder completely: afterwards every tensor is accounted for, finite and of the right shape."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.config import AdapterConfig, read_config
from loraserve_adapters.digest import HashedTensor, adapter_digest
from loraserve_adapters.dtypes import FROM_SAFETENSORS, all_finite, convert, raw_bytes
from loraserve_adapters.errors import AdapterError, shown
from loraserve_adapters.limits import DEFAULT_LIMITS, Limits
from loraserve_adapters.safetensors_file import WEIGHTS_NAME, SafetensorsFile, TensorEntry, open_weights
from loraserve_adapters.targets import Target, close_names, resolve_targets

KEY_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class SourceModule:
    target: Target
    lora_a: TensorEntry
    """[rank, in_features]"""
    lora_b: TensorEntry
    """[out_features, rank]"""


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """What a listing shows of an adapter."""

    digest: str
    lora_ranks: tuple[int, ...]
    """The different ranks, ascending."""
    target_modules: tuple[str, ...]
    """Last parts of the targeted modules' names, in the layout's order, e.g. ("q_proj", "v_proj")."""
    num_modules: int
    num_parameters: int
    size_bytes: int
    """Of the LoRA tensors in the source's format."""
    dtypes: tuple[str, ...]
    """Of the LoRA tensors, e.g. ("bfloat16",)."""
    use_rslora: bool
    base_model_name: str | None
    """As the author wrote it in the config."""


@dataclass(frozen=True, slots=True)
class SourceAdapter:
    """A folder that was read completely and fits the layout. Holds no tensor data and no open file."""

    folder: Path
    digest: str
    config: AdapterConfig
    modules: tuple[SourceModule, ...]
    """In the layout's order."""
    sha256: Mapping[str, bytes]
    """Of each tensor's bytes, by tensor name: what `pack` must find again."""
    summary: AdapterSummary


def read_adapter(folder: Path, layout: BaseLayout, limits: Limits = DEFAULT_LIMITS) -> SourceAdapter:
    """Verifies the whole folder in one pass over the data, 4 MiB at a time. Raises only `AdapterError`."""
    config = read_config(folder, limits)
    targets = resolve_targets(config, layout, limits)
    with open_weights(folder, limits) as weights:
        modules, base_weights = _match_tensors(targets, weights.tensors, layout)
        hashed = [_hash_finite(weights, entry) for module in modules for entry in (module.lora_a, module.lora_b)]
        hashed += [_hash_base_weight(weights, entry, module, layout) for entry, module in base_weights]
    digest = adapter_digest(config, hashed)
    return SourceAdapter(
        folder=folder,
        digest=digest,
        config=config,
        modules=modules,
        sha256={tensor.entry.name: tensor.sha256 for tensor in hashed},
        summary=_summarise(digest, config, modules),
    )


def _match_tensors(
    targets: tuple[Target, ...], tensors: Mapping[str, TensorEntry], layout: BaseLayout
) -> tuple[tuple[SourceModule, ...], list[tuple[TensorEntry, BaseModule]]]:
    """Gives every targeted module its two tensors; the rest may only be copies of base weights that we can check."""
    rest = dict(tensors)
    modules: list[SourceModule] = []
    missing: list[str] = []
    for target in targets:
        names = [f"{KEY_PREFIX}{target.module.name}.lora_{side}.weight" for side in "AB"]
        found = [rest.pop(name, None) for name in names]
        missing += [name for name, entry in zip(names, found, strict=True) if entry is None]
        if found[0] is not None and found[1] is not None:
            modules.append(SourceModule(target, found[0], found[1]))
    checkable = {module.name: module for group in layout.groups for module in group if module.weight_sha256}
    base_weights: list[tuple[TensorEntry, BaseModule]] = []
    for name, entry in rest.items():
        module = checkable.get(_base_weight_owner(name) or "")
        if module is None:
            raise _unexpected(name, targets, layout)
        base_weights.append((entry, module))
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise _refused("missing_tensor", missing[0], f"missing{more}, though adapter_config.json targets its module")
    for module in modules:
        _check_shapes(module)
    return tuple(modules), base_weights


def _base_weight_owner(tensor_name: str) -> str | None:
    """PEFT saves a targeted `lm_head` as `….base_layer.weight`, an untargeted, resized one as `….weight`."""
    if not tensor_name.startswith(KEY_PREFIX) or not tensor_name.endswith(".weight"):
        return None
    return tensor_name.removeprefix(KEY_PREFIX).removesuffix(".weight").removesuffix(".base_layer")


def _unexpected(name: str, targets: tuple[Target, ...], layout: BaseLayout) -> AdapterError:
    if not name.startswith(KEY_PREFIX):
        return _refused("unexpected_tensor", name, f"expected a name that starts with {KEY_PREFIX}")
    module, _, kind = name.removeprefix(KEY_PREFIX).partition(".lora_")
    kind = f"lora_{kind}" if kind else ""
    if "magnitude_vector" in kind:
        return _refused("unexpected_tensor", name, "belongs to DoRA, which is not supported")
    if kind.startswith("lora_embedding_"):
        return _refused("unsupported_module", name, f"LoRA on embeddings is not supported yet: {shown(module)}")
    if not kind:
        if _base_weight_owner(name) in layout.embedding_modules:
            reason = "embeddings cannot be replaced; save with save_embedding_layers=False if they are unchanged"
            return _refused("unexpected_tensor", name, reason)
        return _refused("unexpected_tensor", name, "is no LoRA tensor, and no base weight that could be checked")
    if kind not in ("lora_A.weight", "lora_B.weight"):
        hint = "save_pretrained of PEFT writes lora_A.weight and lora_B.weight without an adapter name"
        return _refused("unexpected_tensor", name, f"found {shown(kind)}; {hint}")
    if any(module == known.name for group in layout.groups for known in group):
        return _refused("unexpected_tensor", name, "its module is not targeted by adapter_config.json")
    return _refused("unknown_module", name, f"the base model has no such linear{close_names(module, layout)}")


def _check_shapes(module: SourceModule) -> None:
    base, rank = module.target.module, module.target.lora_rank
    _check_shape(module.lora_a, (rank, base.in_features), rank_axis=0)
    _check_shape(module.lora_b, (base.out_features, rank), rank_axis=1)
    for entry in (module.lora_a, module.lora_b):
        if entry.dtype not in FROM_SAFETENSORS:
            raise _refused("bad_dtype", entry.name, f"found {entry.dtype}, expected F32, F16 or BF16")


def _check_shape(entry: TensorEntry, expected: tuple[int, int], rank_axis: int) -> None:
    if entry.shape == expected:
        return
    code = "shape_mismatch"
    if len(entry.shape) == 2 and entry.shape[1 - rank_axis] == expected[1 - rank_axis]:
        code = "rank_mismatch"
    reason = f"found {shown(list(entry.shape))}, expected {list(expected)}"
    if code == "rank_mismatch":
        reason += f", for adapter_config.json gives this module rank {expected[rank_axis]}"
    raise _refused(code, entry.name, reason)


def _hash_finite(weights: SafetensorsFile, entry: TensorEntry) -> HashedTensor:
    digest = hashlib.sha256()
    dtype = FROM_SAFETENSORS[entry.dtype]
    for _, block in weights.row_blocks(entry):
        digest.update(raw_bytes(block))
        if not all_finite(block, dtype):
            raise _refused("not_finite", entry.name, "holds NaN or infinity")
    return HashedTensor(entry, digest.digest())


def _hash_base_weight(
    weights: SafetensorsFile, entry: TensorEntry, module: BaseModule, layout: BaseLayout
) -> HashedTensor:
    """Accepts the copy of a base weight only if, in the layout's dtype, it is bit for bit the served one."""
    shape = (module.out_features, module.in_features)
    if entry.shape != shape:
        raise _refused(
            "base_weight_differs",
            entry.name,
            f"found {shown(list(entry.shape))}, the served base model has {list(shape)}",
        )
    if entry.dtype not in FROM_SAFETENSORS:
        raise _refused("bad_dtype", entry.name, f"found {entry.dtype}, expected F32, F16 or BF16")
    source, converted = hashlib.sha256(), hashlib.sha256()
    for _, block in weights.row_blocks(entry):
        source.update(raw_bytes(block))
        converted.update(raw_bytes(convert(block, FROM_SAFETENSORS[entry.dtype], layout.dtype)))
    if converted.hexdigest() != module.weight_sha256:
        raise _refused("base_weight_differs", entry.name, "differs from the served base model's weight")
    return HashedTensor(entry, source.digest())


def _summarise(digest: str, config: AdapterConfig, modules: tuple[SourceModule, ...]) -> AdapterSummary:
    entries = [entry for module in modules for entry in (module.lora_a, module.lora_b)]
    return AdapterSummary(
        digest=digest,
        lora_ranks=tuple(sorted({module.target.lora_rank for module in modules})),
        target_modules=tuple(dict.fromkeys(module.target.module.name.rpartition(".")[2] for module in modules)),
        num_modules=len(modules),
        num_parameters=sum(entry.shape[0] * entry.shape[1] for entry in entries),
        size_bytes=sum(entry.size_bytes for entry in entries),
        dtypes=tuple(sorted({FROM_SAFETENSORS[entry.dtype] for entry in entries})),
        use_rslora=config.use_rslora,
        base_model_name=config.base_model_name,
    )


def _refused(code: str, tensor: str, reason: str) -> AdapterError:
    return AdapterError(code, f"{WEIGHTS_NAME}: {shown(tensor)}: {reason}", file=WEIGHTS_NAME, key=tensor)

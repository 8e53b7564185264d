"""Which tensors of an adapter's file belong to bare weights."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from loraserve_adapters.base_layout import BaseModule
from loraserve_adapters.config import ALL_LINEAR, CONFIG_NAME, AdapterConfig
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.safetensors_file import TensorEntry
from loraserve_adapters.source_module import KEY_PREFIX, SourceModule, SourcePart
from loraserve_adapters.targets import FormerLinearTarget, Target, refuse_expert_specific_patterns


def with_owners_by_shape(targets: Sequence[Target], tensors: Mapping[str, TensorEntry]) -> Iterator[Target]:
    """The targets; if tensors of two weights of the same experts have each other's shapes, the two swap owners.

    PEFT wraps weights in the order of their module's parameters, which changes once an adapter of one of them has been
    used and removed: the next adapter that the same process trains has them the other way round.
    """
    others = {target.owner: target for target in targets}
    for target in targets:
        other = others.get(f"{target.owner}.base_layer") or others.get(target.owner.removesuffix(".base_layer"))
        is_swapped = other is not None and not _fits(target, target, tensors) and _fits(target, other, tensors)
        yield replace(target, owner=other.owner) if other is not None and is_swapped else target


def _fits(target: Target, owner: Target, tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether tensors with the owner's name have the target's numbers of features."""
    a, b = (tensors.get(f"{KEY_PREFIX}{owner.owner}.lora_{side}.weight") for side in "AB")
    features = target.module.in_features, target.module.out_features
    return a is not None and b is not None and (a.shape[1:], b.shape[:1]) == (features[:1], features[1:])


FormerLinears = Sequence[tuple[BaseModule, Sequence[FormerLinearTarget]]]
"""As `Selection.former`."""


def take_former_linears(
    former: FormerLinears, config: AdapterConfig, rest: dict[str, TensorEntry], missing: list[str]
) -> list[SourceModule]:
    """Takes the tensors of experts' linears, and of routers, out of `rest`, and adds to `missing` those not there.

    If one layer has tensors for such a linear, all targeted layers must. If none has, the config may mean today's
    linears of that name. A router's name means nothing else.
    """
    taken: dict[str, SourceModule] = {}
    for module, linears in former:
        if module.name not in taken:
            source = _take(module, linears, rest, missing)
            if source is not None:
                taken[module.name] = source
    without: set[str] = set()
    kinds = {_kind(source.target.owner) for source in taken.values()}
    for module, linears in former:
        is_meant = module.is_router and config.target_modules != ALL_LINEAR
        if module.name not in {*taken, *without} and (is_meant or _kind(linears[0].linear.name) in kinds):
            without.add(module.name)
            missing.append(f"{KEY_PREFIX}{linears[0].linear.of_expert(0)}.lora_A.weight")
    return [*taken.values()]


def _kind(name: str) -> str:
    """The name with numbers replaced, the same for all layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _take(
    module: BaseModule, linears: Sequence[FormerLinearTarget], rest: dict[str, TensorEntry], missing: list[str]
) -> SourceModule | None:
    """None if there is not one of the tensors."""
    assert module.num_matrices is not None
    parts: list[SourcePart] = []
    absent: list[str] = []
    first_rank = 0
    for target in linears:
        for expert in range(module.num_matrices):
            names = [f"{KEY_PREFIX}{target.linear.of_expert(expert)}.lora_{side}.weight" for side in "AB"]
            a, b = (rest.pop(name, None) for name in names)
            absent += [name for name, entry in zip(names, (a, b), strict=True) if entry is None]
            if a is not None and b is not None:
                place = expert, first_rank, target.linear.first_output
                parts.append(SourcePart(a, b, None, None, target.lora_rank, target.linear.out_features, *place))
        first_rank += target.lora_rank
    if len(absent) == 2 * len(linears) * module.num_matrices:
        return None
    missing += absent
    return SourceModule(Target(module, first_rank, linears[0].scaling, linears[0].linear.name), tuple(parts))


def check_former_linears(
    taken: Sequence[SourceModule], former: FormerLinears, config: AdapterConfig, limits: AdapterLimits
) -> None:
    """Checks of linears that have tensors, which apply only because the linears are one weight now."""
    owners = {source.target.owner for source in taken}
    used = [(module, linears) for module, linears in former if linears[0].linear.name in owners]
    for _, linears in used:
        _check_one_weight(linears, config, limits)
    experts = [(target.linear, module.num_matrices or 1) for module, linears in used for target in linears]
    refuse_expert_specific_patterns(experts, config, limits)


def _check_one_weight(linears: Sequence[FormerLinearTarget], config: AdapterConfig, limits: AdapterLimits) -> None:
    names = " and ".join(target.linear.name.rpartition(".")[2] for target in linears)
    rank = sum(target.lora_rank for target in linears)
    if rank > limits.max_lora_rank:
        limit = f"at most {limits.max_lora_rank}"
        reason = f"{names} of an expert, which are one weight here, have a combined rank of {rank}; {limit} is accepted"
        raise _refused("rank_too_large", "r", reason, str(rank), limit)
    scalings = [target.scaling for target in linears]
    if len(set(scalings)) > 1:
        reason = f"{names} of an expert, which are one weight here, have different scalings {scalings}"
        raise _refused("unsupported_option", "alpha_pattern", reason, str(scalings), "equal scalings")
    if config.lora_bias:
        raise _refused("unsupported_option", "lora_bias", "experts and routers cannot have biases", "true", "false")
    if config.use_dora:
        raise _refused("unsupported_option", "use_dora", "experts and routers cannot have DoRA", "true", "false")
    if config.invocation_token_ids:
        reason = "experts and routers cannot have activated LoRA"
        raise _refused("unsupported_option", "alora_invocation_tokens", reason, "a list of token ids", "null")


def _refused(code: str, field: str, reason: str, found: str, expected: str) -> AdapterError:
    message = f"{CONFIG_NAME}: {field}: {reason}"
    return AdapterError(code, message, file=CONFIG_NAME, key=field, found=found, expected=expected)

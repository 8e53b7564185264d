"""Which tensors of an adapter's file belong to bare weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from loraserve_adapters.base_layout import BaseModule
from loraserve_adapters.config import CONFIG_NAME, AdapterConfig
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import Limits
from loraserve_adapters.safetensors_file import TensorEntry
from loraserve_adapters.source_module import KEY_PREFIX, SourceModule, SourcePart
from loraserve_adapters.targets import FormerLinearTarget, Target


def with_owners_by_shape(targets: Sequence[Target], tensors: Mapping[str, TensorEntry]) -> Iterator[Target]:
    """The targets; where tensors of two weights of the same experts have each other's shapes, each with the other's
    owner.

    PEFT wraps them in the order in which the module has its parameters, and that changes once an adapter of one of them
    has been used and taken off: the next one that the same process trains has them the other way round.
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


def take_former_linears(
    module: BaseModule, linears: Sequence[FormerLinearTarget], rest: dict[str, TensorEntry], missing: list[str]
) -> SourceModule | None:
    """Takes the tensors of these linears of all experts, or of a router, out of `rest`, and adds to `missing` what is
    not there; None where there are none at all."""
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
                parts.append(SourcePart(a, b, None, target.lora_rank, target.linear.out_features, *place))
        first_rank += target.lora_rank
    if len(absent) == 2 * len(linears) * module.num_matrices:
        return None
    missing += absent
    return SourceModule(Target(module, first_rank, linears[0].scaling, linears[0].linear.name), tuple(parts))


def check_former_linears(linears: Sequence[FormerLinearTarget], config: AdapterConfig, limits: Limits) -> None:
    """What holds for linears only since they are one weight."""
    names = " and ".join(target.linear.name.rpartition(".")[2] for target in linears)
    rank = sum(target.lora_rank for target in linears)
    if rank > limits.max_lora_rank:
        reason = f"{names} of an expert, which are one weight here, have ranks of {rank} together"
        raise _refused("rank_too_large", "r", reason, str(rank), f"at most {limits.max_lora_rank}")
    scalings = [target.scaling for target in linears]
    if len(set(scalings)) > 1:
        reason = f"{names} of an expert, which are one weight here, have the scalings {scalings}"
        raise _refused("unsupported_option", "alpha_pattern", reason, str(scalings), "equal scalings")
    if config.lora_bias:
        raise _refused("unsupported_option", "lora_bias", "experts and routers cannot have biases", "true", "false")


def _refused(code: str, field: str, reason: str, found: str, expected: str) -> AdapterError:
    message = f"{CONFIG_NAME}: {field}: {reason}"
    return AdapterError(code, message, file=CONFIG_NAME, key=field, found=found, expected=expected)

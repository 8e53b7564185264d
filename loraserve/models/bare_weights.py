"""Adapters for weights that a module passes to `F.linear` itself, as routers of mixtures of experts do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from loraserve_kernels.adapter_table import LoraGroup
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from loraserve.models.context import ForwardContext

_ATTRIBUTE = "weight"
_READS = frozenset({Tensor.dtype.__get__, Tensor.device.__get__, Tensor.shape.__get__})  # pyright: ignore[reportAttributeAccessIssue]
"""Reads of a weight that do not depend on its values."""


@dataclass(frozen=True, slots=True)
class BareWeightSpec:
    module_name: str
    module: nn.Module

    @property
    def name(self) -> str:
        """The parameter's name."""
        return f"{self.module_name}.{_ATTRIBUTE}"

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]"""
        return self.module.get_parameter(_ATTRIBUTE).detach()


class _Watched(Tensor):
    """A weight for which `F.linear` calls `on_linear(x, bias)`; any other use of its values calls `on_other_use`."""

    on_linear: Callable[[Tensor, Tensor | None], Tensor]
    on_other_use: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is linear and len(args) > 1 and isinstance(args[1], _Watched):
                return args[1].on_linear(args[0], args[2] if len(args) > 2 else (kwargs or {}).get("bias"))
            for value in () if func in _READS else (*args, *(kwargs or {}).values()):
                if isinstance(value, _Watched):
                    value.on_other_use()
            return func(*args, **(kwargs or {}))


def attach_bare_weight(spec: BareWeightSpec, group: LoraGroup, context: ForwardContext) -> None:
    """Have adapters added to the module's products with its weight, whose rows must be the batch's."""
    weight = spec.weight

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        y = linear(x, weight, bias)
        context.add_adapters(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), group)
        return y

    _watch(spec.module, weight, multiply, lambda: None)


@contextmanager
def recorded_bare_weights(model: PreTrainedModel, note: Callable[[BareWeightSpec, Tensor], None]) -> Iterator[set[str]]:
    """note: called with each input that `F.linear` multiplies with a module's own weight. Yields the names of
    parameters that are also used in another way, with inputs in another dtype, or with inputs of different sizes."""
    excluded: set[str] = set()
    sizes: dict[str, int] = {}
    watched: list[nn.Module] = []
    for name, module in model.named_modules():
        weight = vars(module).get("_parameters", {}).get(_ATTRIBUTE)
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Linear | nn.Embedding):
            continue
        spec, weight = BareWeightSpec(name, module), weight.detach()

        def multiply(x: Tensor, bias: Tensor | None, spec: BareWeightSpec = spec, weight: Tensor = weight) -> Tensor:
            note(spec, x)
            if x.dtype != weight.dtype or sizes.setdefault(spec.name, x.numel()) != x.numel():
                excluded.add(spec.name)
            return linear(x, weight, bias)

        _watch(module, weight, multiply, lambda spec=spec: excluded.add(spec.name))
        watched.append(module)
    try:
        yield excluded
    finally:
        for module in watched:
            del vars(module)[_ATTRIBUTE]


def _watch(
    module: nn.Module,
    weight: Tensor,
    on_linear: Callable[[Tensor, Tensor | None], Tensor],
    on_other_use: Callable[[], None],
) -> None:
    """Attribute lookup finds the watched weight before the module's parameter of the same name."""
    watched = weight.as_subclass(_Watched)
    watched.on_linear, watched.on_other_use = on_linear, on_other_use
    vars(module)[_ATTRIBUTE] = watched

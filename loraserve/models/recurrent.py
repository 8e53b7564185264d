"""Layers with a recurrent state instead of keys and values: short convolutions, gated delta nets, Mamba-2.

In transformers, the modules of all families compute the recurrence with a few functions of the same names. A prepared
module runs its own forward, with its projections, gates and norms, but with our packed ops in place of these functions.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.context import ForwardContext, StateSpec
from loraserve.models.errors import ModelRefusedError
from loraserve.models.forward_names import uses


@dataclass(slots=True, eq=False)
class RecurrentSpec:
    """A module whose forward calls such functions."""

    module: nn.Module
    states: list[StateSpec] = field(default_factory=list)
    """In the order of its calls."""


def _conv_state(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> StateSpec:
    if activation not in (None, "silu", "swish"):
        raise ModelRefusedError(f"a short convolution with the activation {activation!r} is not supported")
    _require_one_sequence(x)
    return StateSpec((weight.shape[-1] - 1, weight.shape[0]), x.dtype)


def _delta_state(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> StateSpec:
    _require_one_sequence(q)
    return StateSpec((v.shape[2], k.shape[3], v.shape[3]), torch.float32)


def _scan_state(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *_args: Any, **_: Any) -> StateSpec:
    _require_one_sequence(x)
    return StateSpec((x.shape[2], x.shape[3], b.shape[3]), torch.float32)


def _require_one_sequence(x: Tensor) -> None:
    if x.shape[0] != 1:
        raise ModelRefusedError(f"a recurrent layer computes {x.shape[0]} sequences where it has one")


def _conv(
    context: ForwardContext,
    state: Tensor,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """hidden_states: [1, C, T] → the same shape."""
    silu = activation is not None
    rows = hidden_states[0].t()
    return context.backend.causal_conv(rows, weight, bias, state, context.current_batch(), silu=silu).t()[None]


def _delta_rule(
    context: ForwardContext,
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """query, key: [1, T, num_k_heads, k_dim], value: [1, T, num_v_heads, v_dim] → value's shape."""
    beta = beta[0].to(value.dtype)
    batch, normalize = context.current_batch(), use_qk_l2norm_in_kernel
    op = context.backend.gated_delta_rule
    return op(query[0], key[0], value[0], g[0], beta, state, batch, normalize=normalize)[None], None


def _scan(
    context: ForwardContext,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """hidden_states: [1, T, num_heads, head_dim], B, C: [1, T, num_groups, state_dim] → float32 like hidden_states."""
    return context.backend.selective_scan(
        hidden_states[0],
        dt[0],
        A,
        B[0],
        C[0],
        D,
        dt_bias,
        state,
        context.current_batch(),
        softplus=dt_softplus,
        dt_limit=dt_limit,
    )[None]


@dataclass(frozen=True, slots=True)
class _Function:
    state: Callable[..., StateSpec]
    """From the arguments of a call."""
    packed: Callable[..., Any]
    """From the context, a state tensor and the arguments of a call."""


_FUNCTIONS = {
    "causal_conv1d_fn": _Function(_conv_state, _conv),
    "torch_chunk_gated_delta_rule": _Function(_delta_state, _delta_rule),
    "mamba2_chunk_scan": _Function(_scan_state, _scan),
}
_TRAINING_FUNCTION = "mamba2_split_conv1d_scan_combined"


def reads_weights_in_training_only(module: nn.Module) -> bool:
    """Whether its forward reads its linears' weights for a function that it calls only during training (Mamba-2)."""
    return uses(module, _TRAINING_FUNCTION) and computes_recurrence(module)


def computes_recurrence(module: nn.Module) -> bool:
    """Whether its forward calls a function that we replace."""
    return any(uses(module, name) for name in _FUNCTIONS)


@contextmanager
def recorded_recurrence(model: PreTrainedModel) -> Iterator[list[RecurrentSpec]]:
    """Yields a list that afterwards has the recurrent modules that the block's forward pass called, in call order."""
    specs: list[RecurrentSpec] = []

    def recorder(spec: RecurrentSpec, function: _Function, original: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if spec not in specs:
                specs.append(spec)
            spec.states.append(function.state(*args, **kwargs))
            return original(*args, **kwargs)

        return record

    modules = [*filter(computes_recurrence, model.modules())]
    for module in modules:
        _replace_functions(module, partial(recorder, RecurrentSpec(module)))
    try:
        yield specs
    finally:
        for module in modules:
            del module.forward  # the class's


def attach_recurrence(spec: RecurrentSpec, first_state: int, context: ForwardContext) -> None:
    """Compute the module with our ops in a step, and as before outside of it.

    first_state: index of its first state in the context's.
    """
    next_state = first_state

    def packed(function: _Function, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            nonlocal next_state
            if context.batch is None:
                return original(*args, **kwargs)
            state = context.states[next_state]
            next_state += 1
            return function.packed(context, state, *args, **kwargs)

        return compute

    _replace_functions(spec.module, packed)
    inner = spec.module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal next_state
        next_state = first_state
        return inner(*args, **kwargs)

    spec.module.forward = forward


def _replace_functions(
    module: nn.Module, replacement: Callable[[_Function, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Give this module a forward of its own, in which `replacement(function, original)` stands for each function.

    The originals are those in plain torch, which run on any device and print no advice on packages to install.
    """
    original = inspect.unwrap(type(module).forward)
    assert isinstance(original, FunctionType)
    found = {
        name: replacement(function, inspect.unwrap(original.__globals__[name]))
        for name, function in _FUNCTIONS.items()
        if name in original.__globals__ and uses(module, name)
    }
    code, default = original.__code__, original.__defaults__
    changed = FunctionType(code, original.__globals__ | found, original.__name__, default, original.__closure__)
    changed.__kwdefaults__ = original.__kwdefaults__
    module.forward = MethodType(changed, module)

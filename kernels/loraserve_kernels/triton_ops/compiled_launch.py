"""Launch kernels that Triton has already compiled, without Triton's lookup.

For each launch Triton binds the arguments, specializes them, formats all options as text and looks that up: 9 to 14 us
of Python before the launcher runs, and an eager step of a Llama-3-8B has 600 launches. Here a variant is looked up by a
tuple that distinguishes everything Triton does, in 4.0 to 5.3 us (`_rms_norm_kernel` and the LoRA kernels, a shared x86
core).
"""

# The type checker knows only those attributes of a driver that all kinds of devices have.
# pyright: reportAttributeAccessIssue=false

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from torch import Tensor
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.runtime import driver, jit

KNOWN_LINES = (
    "kernel_cache, kernel_key_cache, target, backend, binder = self.device_caches[device]",
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,",
    "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())",
)
"""Lines of `JITFunction.run` in Triton 3.6 and 3.9, which `launch_compiled` replaces."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled kernel. `compiled` is kept because the function is unloaded when it is freed."""

    compiled: Any
    run: Callable[..., None]
    function: Any
    packed_metadata: Any
    constants: tuple[object, ...]
    """All parameters after the positional arguments."""
    used_globals: tuple[tuple[dict[str, object], str, object], ...]
    """(a module's globals, a name, its value); Triton requires that the value does not change."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How Triton specializes a kernel's positional arguments, and the variants known so far.

    If an argument is of another kind than at the first launch, Triton does that launch.
    """

    kernel: Any
    """Kept because plans are looked up by its id."""
    num_arguments: int
    tensors: tuple[int, ...]
    specialised: tuple[int, ...]
    plain: tuple[int, ...]
    variants: dict[tuple[object, ...], Variant] = field(default_factory=dict)

    def key(self, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[object, ...] | None:
        """None = not supported here. NOTE: it must distinguish whatever Triton does, and may distinguish more."""
        if len(arguments) != self.num_arguments:
            return None
        values = tuple(options.values())
        # Types too, because 1 == True == 1.0, but Triton distinguishes these as options.
        key: list[object] = [device, tuple(options), values, *map(type, values)]
        try:
            for index in self.tensors:
                tensor = arguments[index]
                key.append(tensor.dtype)
                key.append(tensor.data_ptr() & 15 == 0)
            for index in self.specialised:
                key.append(_specialised(arguments[index]))
            for index in self.plain:
                key.append(_plain(arguments[index]))
        except (AttributeError, TypeError):
            return None
        return tuple(key)


_plans: dict[int, Plan | None] = {}
"""By the kernel's id; None = Triton does all its launches."""


def launch_compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """As `kernel[grid](*arguments, **options)`, which it calls for the first launch of a variant.

    options: constants and Triton's options, all hashable.
    """
    try:
        plan = _plans[id(kernel)]
    except KeyError:
        plan = _plans[id(kernel)] = _plan(kernel, arguments)
    if plan is None or _is_watched(kernel):
        kernel[grid](*arguments, **options)
        return
    active = driver.active
    device = active.get_current_device()
    key = plan.key(device, arguments, options)
    variant = plan.variants.get(key) if key is not None else None
    if variant is None or not _is_unchanged(variant):
        compiled = kernel[grid](*arguments, **options)
        if key is not None and compiled is not None:  # compiled is None if a hook prevents compiling
            plan.variants[key] = _variant(kernel, compiled, options, len(arguments))
        return
    grid_0, grid_1, grid_2 = (*grid, 1, 1)[:3]
    variant.run(
        grid_0,
        grid_1,
        grid_2,
        active.get_current_stream(device),
        variant.function,
        variant.packed_metadata,
        None,  # launch metadata for hooks, and the two hooks
        None,
        None,
        *arguments,
        *variant.constants,
    )


@cache
def is_known() -> bool:
    """Whether this version of Triton launches like `launch_compiled` and specializes like `Plan.key`."""
    needed = {
        jit: ("JITFunction", "native_specialize_impl"),
        BaseBackend: ("supports_native_tensor_specialization",),
        knobs.runtime: ("launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook", "debug"),
        knobs.compilation: ("instrumentation_mode",),
    }
    try:
        source = inspect.getsource(jit)
    except OSError:
        return False
    return all(line in source for line in KNOWN_LINES) and all(
        hasattr(holder, name) for holder, names in needed.items() for name in names
    )


def _plan(kernel: Any, arguments: tuple[Any, ...]) -> Plan | None:
    """None if the specialization of the kernel or its arguments is not supported here."""
    if not isinstance(kernel, jit.JITFunction) or not is_known():
        return None
    positional, named = kernel.params[: len(arguments)], kernel.params[len(arguments) :]
    backend = kernel.device_caches[driver.active.get_current_device()][3]
    if (
        not backend.supports_native_tensor_specialization  # by a tensor's dtype and whether 16 divides its address
        or any(param.annotation for param in positional)
        or not all(param.is_constexpr for param in named)
    ):
        return None
    tensors = tuple(i for i, argument in enumerate(arguments) if isinstance(argument, Tensor))
    others = [param for param in positional if param.num not in tensors]
    return Plan(
        kernel,
        num_arguments=len(arguments),
        tensors=tensors,
        specialised=tuple(param.num for param in others if not param.do_not_specialize),
        plain=tuple(param.num for param in others if param.do_not_specialize),
    )


def _variant(kernel: Any, compiled: Any, options: dict[str, Any], num_arguments: int) -> Variant:
    if hasattr(compiled, "result"):  # compiled asynchronously
        compiled = compiled.result()
    constants = tuple(options.get(param.name, param.default) for param in kernel.params[num_arguments:])
    used = tuple((names, name, names[name]) for (name, _), (_, names) in kernel.used_global_vals.items())
    return Variant(compiled, compiled.run, compiled.function, compiled.packed_metadata, constants, used)


def _is_watched(kernel: Any) -> bool:
    """Whether Triton has hooks for launches, or settings that change how it compiles."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # a function, a chain of 0 or more, or None
    return bool(
        kernel.pre_run_hooks
        or getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or runtime.add_stages_inspection_hook
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )


def _is_unchanged(variant: Variant) -> bool:
    return not variant.used_globals or all(names.get(name) is value for names, name, value in variant.used_globals)


@lru_cache(maxsize=1 << 14, typed=True)
def _specialised(number: object) -> tuple[object, object]:
    """Triton's specialization of a number: an int 1 is a constant; else its type and whether it is a multiple of 16."""
    return jit.native_specialize_impl(BaseBackend, _number(number), False, True, True)


@lru_cache(maxsize=1 << 14, typed=True)
def _plain(number: object) -> tuple[object, object]:
    """The same by type only."""
    return jit.native_specialize_impl(BaseBackend, _number(number), False, False, False)


def _number(argument: object) -> object:
    if type(argument) not in (int, float, bool):
        raise TypeError(f"a kernel's argument is a {type(argument).__name__}")
    return argument

"""Compares the launcher's arguments for compiled kernels with those that Triton itself passes, without a GPU.

A program of its own, like `compile_for_gpus.py`. It uses the launches of the ops used in serving. Each variant that
Triton would compile is replaced by one that records the arguments of its launcher. Prints a JSON object. Argument: one
of the checks below.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from loraserve_kernels.triton_ops import compiled_launch, launch
from loraserve_kernels.triton_ops.compiled_launch import launch_compiled
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.compile_for_gpus import SINKS, AbsentGpuDriver, add_lora, attend, choose_tokens, small_ops

NUM_CHANGED = 400
"""Launches with changed arguments, for each launch of the ops."""
NUMBERS = [0, 1, 2, 15, 16, 17, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 8, -(2**31), -(2**31) - 1, 2**63, 0.0, 1.0, True]
DTYPES = [torch.bfloat16, torch.float32, torch.int32, torch.uint8]
OTHER_CONSTANTS = [0, 1, 2, 4, True, False, 1.0, (1, 2), (2, 1)]


class Recorder:
    """Takes the place of a compiled kernel."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.function = object()
        self.packed_metadata = object()

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *arguments: object) -> None:
        recorded.append((self, arguments))


recorded: list[tuple[Recorder, tuple[object, ...]]] = []


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def by_triton(self) -> tuple[Recorder, tuple[object, ...]]:
        self.kernel[self.grid](*self.arguments, **self.options)
        return recorded.pop()

    def here(self) -> tuple[Recorder, tuple[object, ...]]:
        launch_compiled(self.kernel, self.grid, self.arguments, dict(self.options))
        return recorded.pop()


def record(self: JITFunction, key: str, _signature: object, device: int, *_: object) -> Recorder | None:
    """Replaces `JITFunction._do_compile`; like it, does nothing if the hook forbids compiling."""
    if knobs.runtime.jit_cache_hook is not None and knobs.runtime.jit_cache_hook():
        return None
    assert self.cache_key  # computing it finds the globals that the kernel uses
    return self.device_caches[device][0].setdefault(key, Recorder(key))


class Runs:
    """Counts the launches that go through Triton."""

    def __init__(self) -> None:
        self.count = 0
        run = JITFunction.run

        def counted(kernel: JITFunction, *args: object, **kwargs: object) -> object:
            self.count += 1
            return run(kernel, *args, **kwargs)

        JITFunction.run = counted

    def of(self, call: Callable[[], object]) -> int:
        before = self.count
        call()
        return self.count - before


def served_launches() -> list[Launch]:
    """The launches of the ops of a decoder layer and of sampling."""
    found: list[Launch] = []
    launch.launch_compiled = lambda *launched: found.append(Launch(*launched))
    for call in (
        add_lora(64, torch.bfloat16),
        add_lora(1024, torch.bfloat16),
        attend(32, 8, 128, torch.bfloat16),
        attend(64, 8, 64, torch.bfloat16, sliding_window=128, sinks=SINKS),
        small_ops,
        lambda: choose_tokens(torch.bfloat16, 128_256),
    ):
        call()
    return found


def same_arguments(launches: list[Launch], runs: Runs) -> dict[str, object]:
    """For each launch, the launcher gets the same arguments from Triton and from `launch_compiled`."""
    kernels: list[str] = []
    for launched in launches:
        variant, wanted = launched.by_triton()
        launched.here()
        assert runs.of(lambda launched=launched: launched.here()) == 0, launched.kernel.__name__
        again, given = launched.here()
        assert again is variant
        assert len(given) == len(wanted), launched.kernel.__name__
        for position, (ours, theirs) in enumerate(zip(given, wanted, strict=True)):
            if position in (7, 8):  # launch hooks: unset
                assert ours is None, ours
                assert theirs is None or not theirs.calls, theirs
            else:
                assert ours is theirs or (type(ours) is type(theirs) and ours == theirs), (position, ours, theirs)
        kernels.append(launched.kernel.__name__)
    return {"kernels": kernels}


def same_variants(launches: list[Launch], runs: Runs) -> dict[str, object]:
    """For randomly changed arguments, the variant is the one Triton chooses, whatever was launched before."""
    chance = random.Random(20)
    num_changed = num_by_triton = 0
    variants = set()
    for launched in launches:
        launched.here()  # the first launch determines which arguments are tensors
        for _ in range(NUM_CHANGED):
            changed = with_changes(launched, chance)
            num_by_triton += runs.of(lambda changed=changed: launch_compiled(*parts(changed)))
            variant, given = recorded.pop()
            wanted, theirs = changed.by_triton()
            assert variant is wanted, f"{variant.key} was launched instead of {wanted.key}"
            assert [type(argument) for argument in given[9:]] == [type(argument) for argument in theirs[9:]]
            num_changed += 1
            variants.add(wanted)
    return {"num_changed": num_changed, "num_by_triton": num_by_triton, "num_variants": len(variants)}


def parts(launched: Launch) -> tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    return launched.kernel, launched.grid, launched.arguments, dict(launched.options)


def with_changes(launched: Launch, chance: random.Random) -> Launch:
    """Changes up to three arguments or constants; the choices are so few that many combinations recur."""
    arguments, options = list(launched.arguments), dict(launched.options)
    constants = [name for name in options if name in launched.kernel.arg_names]
    for _ in range(chance.randrange(4)):
        index = chance.randrange(len(arguments) + 2)
        if index < len(arguments):
            arguments[index] = changed_argument(arguments[index], chance)
        elif index == len(arguments):
            options[chance.choice(constants)] = chance.choice(OTHER_CONSTANTS)
        else:
            name, value = chance.choice([("num_warps", 1), ("num_warps", True), ("num_stages", 2), ("maxnreg", 64)])
            options[name] = value
    return Launch(launched.kernel, launched.grid, tuple(arguments), options)


def changed_argument(argument: Any, chance: random.Random) -> object:
    if isinstance(argument, Tensor) and chance.random() < 0.9:
        offset = chance.choice([0, 0, 1, 4, 16])
        return torch.zeros(32, dtype=chance.choice(DTYPES))[offset:]
    if chance.random() < 0.05:
        return chance.choice([None, torch.zeros(32)])
    return chance.choice(NUMBERS)


def left_to_triton(launches: list[Launch], runs: Runs) -> dict[str, object]:
    """Reasons for a launch to go through Triton although its variant is known; each counts 1 launch."""
    launched = next(launched for launched in launches if launched.kernel.__name__ == "_rotary_kv_write_kernel")
    kernel, found = launched.kernel, {}

    def note(name: str) -> None:
        found[name] = runs.of(launched.here)

    launched.here()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(knobs.runtime, name)
        hook.add(note)
        note(f"{name} of a chain")
        hook.remove(note)
        setattr(knobs.runtime, name, note)
        note(name)
        setattr(knobs.runtime, name, hook)
    for name, holder, value in (
        ("debug", knobs.runtime, True),
        ("add_stages_inspection_hook", knobs.runtime, lambda *_: ("", "")),
        ("instrumentation_mode", knobs.compilation, "fpsan"),
    ):
        before = getattr(holder, name)
        setattr(holder, name, value)
        note(name)
        setattr(holder, name, before)
    kernel.add_pre_run_hook(lambda *_, **__: None)
    note("pre_run_hooks")
    kernel.pre_run_hooks.clear()
    names, name, value = used_global(kernel)
    names[name] = type(value)(-1)
    try:
        launched.here()
    except RuntimeError as error:
        found["changed global"] = int("has changed since we compiled" in str(error))
    names[name] = value
    assert runs.of(launched.here) == 0, "nothing asks for it any more"

    other = with_constant(launched, num_warps=2)
    knobs.runtime.jit_cache_hook = lambda **_: True
    found["not compiled"] = runs.of(lambda: launch_compiled(*parts(other)))
    knobs.runtime.jit_cache_hook = None
    found["compiled after all"] = runs.of(other.here)

    compiled_launch._plans.clear()
    compiled_launch.is_known.cache_clear()
    compiled_launch.KNOWN_LINES = ("kernel.run(another order of arguments)",)
    launched.here()
    note("another Triton")
    return found


def used_global(kernel: JITFunction) -> tuple[dict[str, Any], str, Any]:
    (name, _), (_, names) = next(iter(kernel.used_global_vals.items()))
    return names, name, names[name]


def with_constant(launched: Launch, **options: object) -> Launch:
    return Launch(launched.kernel, launched.grid, launched.arguments, launched.options | options)


def main() -> None:
    check = {"arguments": same_arguments, "variants": same_variants, "fallbacks": left_to_triton}[sys.argv[1]]
    driver.set_active(AbsentGpuDriver(90))
    launch.may_depend = lambda _: True
    JITFunction._do_compile = record
    print(json.dumps(check(served_launches(), Runs())))


if __name__ == "__main__":
    main()

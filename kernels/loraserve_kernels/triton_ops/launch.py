"""How kernels are launched: each may start while the one in front of it ends.

Between two nodes of a CUDA graph an H200 idles for half a microsecond or more, and a decode step of a Llama-3-8B with
LoRA has 20 of them a layer.
With NVIDIA's programmatic dependent launch the next kernel's programs are in place by then, and wait inside.
"""

# Kernels are another language, of whose modules a type checker of Python knows nothing.
# pyright: reportAttributeAccessIssue=false

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.triton_ops.compiled_launch import launch_compiled

FIRST_WITH_DEPENDENT_LAUNCH = (9, 0)
"""Compute capability: Hopper's."""


@triton.jit
def wait_for_inputs(IS_DEPENDENT: tl.constexpr):
    """What every kernel begins with, before it reads or writes anything and before any program of it may end.

    NOTE: a kernel all of whose programs ended without it could end before the one in front, for which the one behind
    would then not wait.
    """
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *arguments: object, **options: object) -> None:
    """kernel: has `IS_DEPENDENT` and begins with `wait_for_inputs`. options: constants, and Triton's own."""
    is_dependent = may_depend(first.device)
    options["IS_DEPENDENT"] = is_dependent
    if is_dependent:
        options["launch_pdl"] = True
    launch_compiled(kernel, grid, (first, *arguments), options)


@cache
def may_depend(device: torch.device) -> bool:
    """Whether the device starts kernels so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_WITH_DEPENDENT_LAUNCH

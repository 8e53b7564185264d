"""Launch kernels so that each may start while the preceding one ends.

Between two nodes of a CUDA graph an H200 idles for half a microsecond or more, and a decode step of a Llama-3-8B with
LoRA has 20 nodes per layer. With NVIDIA's programmatic dependent launch, the next kernel's programs are already
resident when the preceding kernel ends, and wait for it in `wait_for_inputs`.
"""

# Python type checkers do not know the modules that kernels use.
# pyright: reportAttributeAccessIssue=false

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.triton_ops.compiled_launch import launch_compiled

FIRST_WITH_DEPENDENT_LAUNCH = (9, 0)
"""Hopper's compute capability."""


@triton.jit
def wait_for_inputs(IS_DEPENDENT: tl.constexpr):
    """Every kernel starts with this, before it reads or writes anything and before any of its programs may end.

    NOTE: a kernel whose programs all ended without this call could end before the preceding kernel, and the following
    kernel would then not wait for the preceding one.
    """
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *arguments: object, **options: object) -> None:
    """kernel: has `IS_DEPENDENT` and starts with `wait_for_inputs`. options: constants and Triton's options."""
    is_dependent = may_depend(first.device)
    options["IS_DEPENDENT"] = is_dependent
    if is_dependent:
        options["launch_pdl"] = True
    launch_compiled(kernel, grid, (first, *arguments), options)


@cache
def may_depend(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_WITH_DEPENDENT_LAUNCH

"""How much two correct computations of a model's logits may differ, measured on the model itself.

The effect of rounding grows with a model's width and depth, and with its weights. With random weights, two correct
bfloat16 computations of a 32-layer Llama differ by 1.5 % of the largest logit at a width of 256, and by 7 % at 4,096.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""The least for any model, as a fraction of the largest |logit|. Wrong models differ by 0.1 and more."""
MARGIN = 1.5
"""Factor on the effect of rounding every module's output once more. Two correct computations differed by 0.5 to 1.0
times that effect, most in models whose large weights make each layer amplify it."""


def logits_tolerance(model: PreTrainedModel, logits: Tensor, compute: Callable[[], Tensor]) -> float:
    """The largest difference that counts as rounding, as a fraction of the largest |logit|.

    logits: the model's own; compute: computes them again.
    """
    with extra_rounding(model):
        moved = compute()
    return tolerance_of(logits, moved, model.dtype)


def tolerance_of(logits: Tensor, moved: Tensor, dtype: torch.dtype) -> float:
    """As `logits_tolerance`; moved: the logits under `extra_rounding`."""
    share = float((moved - logits).abs().max() / logits.abs().max())
    return max(TOLERANCE[dtype], MARGIN * share)


@contextmanager
def extra_rounding(model: nn.Module) -> Iterator[None]:
    """In the block, each innermost module's output is changed at random, as much as rounding may change it."""
    generators: dict[torch.device, torch.Generator] = {}

    def move(_module: nn.Module, _args: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        generator = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(0))
        half = torch.rand(output.shape, generator=generator, device=output.device) - 0.5
        return (output.float() * (1 + half * torch.finfo(output.dtype).eps)).to(output.dtype)

    innermost = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(move) for module in innermost]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

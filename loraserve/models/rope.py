"""Rotary embeddings, frozen at load if they would depend on the batch, and tabulated.

`longrope` and `dynamic` RoPE pick their frequencies from the largest position of the *batch*, so the answer of a short
sequence would change beside a long one. Frozen, they depend on max_model_len only: long factors iff it exceeds the
length that the model was originally trained for.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

MAX_TABLE_BYTES = 16 << 20
"""For one rotary embedding; if the table would be larger, every step computes the angles."""
MAX_GPU_TABLE_BYTES = 256 << 20
"""Larger, because computing angles takes ten launches on a GPU. 131,072 positions of 128 features take 64 MB."""


class RotaryTable(nn.Module):
    """(cos, sin) of a rotary embedding, looked up by position; called like the original.

    Computing them took 190 µs of a decode step of 16 rows, half of that in torch's `cos`, which starts threads.
    """

    def __init__(self, cos: Tensor, sin: Tensor, original: nn.Module) -> None:
        """cos, sin: [max_model_len, rotary_dim], or as many columns as the original returns."""
        super().__init__()
        self.cos = cos
        self.sin = sin
        self.is_half_width = is_half_width(original)
        self.config = getattr(original, "config", None)  # Granite's models with windows read it

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # Some families have a position in each of three grids, for images; of a text all are the same.
        positions = position_ids[0] if position_ids.dim() == 2 else position_ids[0, 0]
        return self.cos.index_select(0, positions)[None], self.sin.index_select(0, positions)[None]


class FullWidthRotary(nn.Module):
    """Repeats (cos, sin) of an embedding that returns one factor per pair of features (GPT-OSS), to one per feature."""

    def __init__(self, halves: nn.Module) -> None:
        super().__init__()
        self.halves = halves

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.halves(x, position_ids)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


def is_half_width(module: nn.Module) -> bool:
    """Whether it is a rotary embedding that returns one factor per pair of features."""
    if isinstance(module, RotaryTable):
        return module.is_half_width
    return _depends_only_on_positions(module) and _num_factors(module) == module.get_buffer("inv_freq").shape[-1]


def tabulate_rope(model: nn.Module, max_model_len: int, dtype: torch.dtype) -> None:
    """Replace every rotary embedding that depends on positions alone, if its table is not too large."""
    for name, module in list(model.named_modules()):
        if not _depends_only_on_positions(module) or (num_factors := _num_factors(module)) == 0:
            continue
        device = module.get_buffer("inv_freq").device
        max_bytes = MAX_TABLE_BYTES if device.type == "cpu" else MAX_GPU_TABLE_BYTES
        if 2 * max_model_len * num_factors * dtype.itemsize <= max_bytes:
            x = torch.empty(1, 1, 1, dtype=dtype, device=device)
            cos, sin = module(x, torch.arange(max_model_len, device=device)[None])
            table = RotaryTable(cos[0].contiguous(), sin[0].contiguous(), module)
            model.set_submodule(name, table)


def _depends_only_on_positions(module: nn.Module) -> bool:
    """Whether it is a rotary embedding that does not depend on the kind of layer."""
    if not isinstance(getattr(module, "inv_freq", None), Tensor):
        return False
    return list(inspect.signature(module.forward).parameters) == ["x", "position_ids"]


def _num_factors(module: nn.Module) -> int:
    """Factors per position; 0 if it takes positions in several grids only (Qwen3.5 before transformers 5.19) or returns
    complex numbers (DeepSeek V2)."""
    device = module.get_buffer("inv_freq").device
    position_ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        factors = module(torch.empty(1, 1, 1, device=device), position_ids)
    except IndexError:
        return 0
    return factors[0].shape[-1] if isinstance(factors, tuple) else 0


def is_batch_dependent(rope_type: object) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def freeze_rope(model: nn.Module, max_model_len: int) -> None:
    """Fix every batch-dependent rotary embedding of the model for sequences of up to `max_model_len` tokens."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):
            for layer_type, kind in rope_type.items():
                if is_batch_dependent(kind):
                    _freeze(module, kind, layer_type, max_model_len)
                    rope_type[layer_type] = "default"
        elif is_batch_dependent(rope_type):
            _freeze(module, str(rope_type), None, max_model_len)
            vars(module)["rope_type"] = "default"


def _freeze(module: nn.Module, rope_type: str, layer_type: str | None, max_model_len: int) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer_name = f"{prefix}inv_freq"
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, getattr(module, buffer_name).device, seq_len=max_model_len, **kwargs
    )
    setattr(module, buffer_name, inv_freq)
    setattr(module, f"{prefix}attention_scaling", attention_scaling)

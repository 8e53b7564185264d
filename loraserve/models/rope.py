"""Rotary frequencies that depend on the longest sequence of a batch, frozen at load.

`longrope` and `dynamic` RoPE pick their frequencies from the largest position of the *batch*, so a short sequence would
change its answer beside a long one. Frozen, they depend on max_model_len only: long factors iff it exceeds the length
the model was first trained for.
"""

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


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
            setattr(module, "rope_type", "default")  # noqa: B010 - nn.Module is typed to hold tensors only


def _freeze(module: nn.Module, rope_type: str, layer_type: str | None, max_model_len: int) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer_name = f"{prefix}inv_freq"
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, getattr(module, buffer_name).device, seq_len=max_model_len, **kwargs
    )
    setattr(module, buffer_name, inv_freq)
    setattr(module, f"{prefix}attention_scaling", attention_scaling)

"""The tensors of an adapter's file that belong to one module of the base, and copies of the base's own."""

from dataclasses import dataclass

from loraserve_adapters.config_values import HEAD
from loraserve_adapters.safetensors_file import TensorEntry
from loraserve_adapters.targets import Target

KEY_PREFIX = "base_model.model."
"""Prefix of all their names, as PEFT writes them."""
OF_LINEARS = ("lora_A.weight", "lora_B.weight")
OF_EMBEDDINGS = ("lora_embedding_A", "lora_embedding_B")
BIAS, MAGNITUDE = "lora_B.bias", "lora_magnitude_vector"
"""What follows the module in the names of its tensors."""
HEAD_WEIGHT = f"{KEY_PREFIX}{HEAD}.weight"
"""The tensor of a classifier's head."""


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Tensors under one name: all those of a module, or those of an expert's linear that became a part of it."""

    lora_a: TensorEntry
    """[rank, in_features]; of all experts [num_experts * rank, in_features], rows of an expert adjacent."""
    lora_b: TensorEntry
    """[out_features, rank]; of all experts [out_features, rank * num_experts], columns of a rank adjacent."""
    bias: TensorEntry | None
    """[out_features]; with `lora_bias` only."""
    magnitude: TensorEntry | None
    """[out_features]; with DoRA only."""
    lora_rank: int
    out_features: int
    expert: int | None = None
    """None = all tensors of the module."""
    first_rank: int = 0
    """Among the expert's ranks."""
    first_output: int = 0

    @property
    def entries(self) -> list[TensorEntry]:
        return [entry for entry in (self.lora_a, self.lora_b, self.bias, self.magnitude) if entry is not None]


@dataclass(frozen=True, slots=True)
class SourceModule:
    target: Target
    parts: tuple[SourcePart, ...]

    @property
    def entries(self) -> list[TensorEntry]:
        return [entry for part in self.parts for entry in part.entries]


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A tensor of the base model beside the adapter's; accepted only if it equals the served one."""

    entry: TensorEntry
    shape: tuple[int, ...]
    """Of the served one."""
    sha256: str
    """Of the served one's bytes, in `BaseLayout.dtype`."""

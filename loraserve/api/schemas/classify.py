"""/v1/classify."""

import msgspec

from loraserve.api.schemas.inputs import InputFields
from loraserve.api.schemas.usage import Usage


class ClassifyRequest(InputFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names and meaning as in vLLM's API."""

    use_activation: bool | None = None
    """False = the numbers that the adapter's head gives. Default: true, probabilities: of all labels together where one
    of them is right, of each by itself where there is one alone or several may be right."""


class Classification(msgspec.Struct, frozen=True):
    index: int
    label: str
    """With the largest of `probs`, and the first of several: its name in the adapter's `id2label`, else LABEL_0,
    LABEL_1, …"""
    probs: list[float]
    """By label."""
    num_classes: int


class ClassifyResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    """Unix time."""
    model: str
    data: list[Classification]
    """In the order of the inputs."""
    usage: Usage

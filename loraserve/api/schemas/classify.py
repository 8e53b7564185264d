"""/v1/classify."""

import msgspec

from loraserve.api.schemas.inputs import InputFields
from loraserve.api.schemas.usage import Usage


class ClassifyRequest(InputFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in vLLM's API."""

    use_activation: bool | None = None
    """True: return probabilities, by softmax over all labels if exactly one label is right, by sigmoid of each label if
    there is a single label or several may be right (multi_label_classification); a regression head's numbers stay as
    they are. False: return the head's numbers. Default: true."""


class Classification(msgspec.Struct, frozen=True):
    index: int
    """Position of the input in the request."""
    label: str
    """The label with the largest number in `probs`, the first one if several are equal: its name in the adapter's
    `id2label`, else LABEL_0, LABEL_1, …"""
    probs: list[float]
    """One number per label, in the order of the head's outputs."""
    num_classes: int
    """Number of labels."""


class ClassifyResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    """Unix seconds."""
    model: str
    data: list[Classification]
    """In the order of the inputs."""
    usage: Usage

"""Why a model cannot be served."""

import torch
from loraserve_kernels.backend import KernelTooLargeError

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError, KernelTooLargeError)
"""They say nothing of the model, and after the second every call of the device fails."""


class ModelRefusedError(Exception):
    """The model is refused by name; the message says what was found and what would work."""

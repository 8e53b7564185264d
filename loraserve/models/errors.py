"""Why a model cannot be served."""

import torch
from loraserve_kernels.backend import KernelTooLargeError

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError, KernelTooLargeError)
"""Device failures: they say nothing about the model, and after the second one every device call fails."""


class ModelRefusedError(Exception):
    """The message names the refused model and says what was found and what would work."""

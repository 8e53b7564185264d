"""Which backend serves on a device, decided once at start."""

from pathlib import Path

import torch

from loraserve_kernels.backend import Backend
from loraserve_kernels.c_compiler import CompilerUnavailable
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import load_cpu_library
from loraserve_kernels.reference_backend import ReferenceBackend

REQUESTS = ("auto", "cpu", "reference")


def choose_backend(
    device: torch.device | str, requested: str = "auto", cache_dir: Path | None = None
) -> tuple[Backend, str]:
    """(backend, reason for a person). "auto" never fails; a backend requested by name that cannot run raises.

    Raises `ValueError` for an unknown name or a device the backend does not serve, `CompilerUnavailable` when "cpu" was
    requested and cannot be built.
    """
    device = torch.device(device)
    if requested not in REQUESTS:
        raise ValueError(f"backend is {requested!r}, expected one of {', '.join(REQUESTS)}")
    if requested == "reference":
        return ReferenceBackend(), "reference: requested"
    if device.type != "cpu":
        if requested == "cpu":
            raise ValueError(f"device is {device}, expected cpu for the cpu backend")
        return ReferenceBackend(), f"reference: no kernels for device {device}"
    try:
        library = load_cpu_library(cache_dir)
    except CompilerUnavailable as error:
        if requested == "cpu":
            raise
        return ReferenceBackend(), f"reference: CPU kernels not built ({error})"
    return CpuBackend(library), f"cpu: {library.origin}, OpenMP {library.openmp}"

"""Choose the backend for a device, once at start."""

from errno import EACCES, EPERM, EROFS
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError

import torch

from loraserve_kernels.backend import Backend
from loraserve_kernels.c_compiler import CompilerUnavailable
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import load_cpu_library
from loraserve_kernels.reference_backend import ReferenceBackend

REQUESTS = ("auto", "cpu", "triton", "reference")
TRITON_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that our Triton kernels support. Older GPUs have no bfloat16 arithmetic."""
_NOT_WRITABLE = (EACCES, EPERM, EROFS)


def choose_backend(
    device: torch.device | str, requested: str = "auto", cache_dir: Path | None = None
) -> tuple[Backend, str]:
    """(backend, reason for a person). "auto" never fails on a CPU; a backend requested by name raises if it cannot run.

    "auto" is "triton" on CUDA devices and "cpu" on CPUs, or "reference" on other devices, without triton, on a GPU too
    old for it, or if the C functions cannot be built. Raises `ValueError` for an unknown name, a device that the
    requested backend does not serve, a missing triton if it was requested, or a triton that cannot launch (also with
    "auto"), and `CompilerUnavailable` if a requested "cpu" cannot be built.
    """
    device = torch.device(device)
    if requested not in REQUESTS:
        raise ValueError(f"backend is {requested!r}, expected one of {', '.join(REQUESTS)}")
    if requested == "reference":
        return ReferenceBackend(), "reference: requested"
    if requested == "triton" or (requested == "auto" and device.type == "cuda"):
        return _triton(device, requested)
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
    amx = ", AMX" if library.has_amx else ""
    openmp = "no OpenMP: one core for separate operations" if library.openmp == "none" else f"OpenMP {library.openmp}"
    return CpuBackend(library), f"cpu: {library.origin}{amx}, {openmp}"


def _triton(device: torch.device, requested: str) -> tuple[Backend, str]:
    if find_spec("triton") is None:
        if requested == "triton":
            raise ValueError("the triton backend needs triton, which is not installed: pip install triton")
        return (
            ReferenceBackend(),
            f"reference: triton is not installed, so there are no kernels for {device}: pip install triton",
        )
    # Imported here: triton comes only with torch's GPU builds, and importing it takes a second.
    from triton import __version__, knobs

    is_interpreted = knobs.runtime.interpret
    if device.type not in ("cuda", "cpu") or (device.type == "cpu" and not is_interpreted):
        hint = "; on a CPU it runs only in Triton's interpreter, for tests: set TRITON_INTERPRET=1"
        raise ValueError(f"device is {device}, expected cuda for the triton backend{hint}")
    if not is_interpreted:
        too_old = _why_too_old(device)
        if too_old is not None:
            if requested == "triton":
                raise ValueError(f"{too_old}: use auto or reference, which are slow on this GPU")
            return ReferenceBackend(), f"reference: {too_old}; steps take longer"
        _require_launcher(device)
    from loraserve_kernels.triton_backend import TritonBackend

    return TritonBackend(), f"triton: {__version__}{', interpreted' if is_interpreted else ''}"


def _why_too_old(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability >= TRITON_CAPABILITY:
        return None
    found, least = ("{}.{}".format(*each) for each in (capability, TRITON_CAPABILITY))
    return f"{device} has compute capability {found}, the triton backend needs {least} or newer"


def _require_launcher(device: torch.device) -> None:
    """Raise `ValueError` unless Triton can launch kernels: it compiles its launcher, which is in C, when first used."""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except (RuntimeError, OSError, CalledProcessError, ImportError) as error:
        expected = "a C compiler and Python's headers: install gcc, libc6-dev and, for the system's Python, python3-dev"
        if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
            expected = "a writable folder for its cache: set TRITON_CACHE_DIR"
        raise ValueError(f"triton cannot launch kernels on {device} ({error}), expected {expected}") from error

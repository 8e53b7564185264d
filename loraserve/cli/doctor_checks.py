"""The checks of `loraserve doctor`. Each returns its finding; none raises."""

import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from loraserve.cli.serve.listen import ListenError, bind_tcp
from loraserve.cli.version import installed_version
from loraserve.engine.cpu_budget import available_cpus, available_memory_bytes
from loraserve.models.model_place import is_cached, why_absent

MIB, GIB = 1 << 20, 1 << 30
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MIN_PYTHON = (3, 11)
MIN_FREE_DISK_BYTES = GIB
MIN_FREE_MEMORY_BYTES = GIB
PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "litestar",
    "uvicorn",
    "msgspec",
    "httpx",
    "aiohttp",
)


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    """The server starts, but slower or with fewer features."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    found: str
    remedy: str = ""


def all_checks(model: str, host: str, port: int, data_dir: Path) -> list[Check]:
    return [
        python(),
        packages(),
        cpu(),
        memory(),
        kernels(),
        gpu_kernels(),
        disk(data_dir),
        port_is_free(host, port),
        model_files(model),
    ]


def python() -> Check:
    if sys.version_info < MIN_PYTHON:
        return Check("python", Status.FAIL, platform.python_version(), "install Python 3.11 or later")
    return Check("python", Status.OK, platform.python_version())


def packages() -> Check:
    missing = [name for name in PACKAGES if installed_version(name) is None]
    if missing:
        return Check("packages", Status.FAIL, f"missing: {', '.join(missing)}", "pip install loraserve")
    return Check("packages", Status.OK, ", ".join(f"{name} {installed_version(name)}" for name in PACKAGES[:2]))


def cpu() -> Check:
    """NOTE: tests for fast bfloat16 with the same function as the engine when it chooses a dtype."""
    found = f"{available_cpus()} usable CPUs, {platform.machine()}"
    try:
        from loraserve.models.cpu_features import has_fast_bfloat16

        has_bfloat16 = has_fast_bfloat16()
    except (ImportError, AttributeError):
        return Check("cpu", Status.WARN, found + ", bfloat16 unknown", "float32 is used unless --dtype is given")
    if not has_bfloat16:
        return Check("cpu", Status.OK, found + ", bfloat16 slow in torch: only the compiled kernels are fast with it")
    return Check("cpu", Status.OK, found + ", fast bfloat16")


def memory() -> Check:
    available = available_memory_bytes()
    found = f"{available / GIB:.1f} GiB available"
    if available < MIN_FREE_MEMORY_BYTES:
        return Check("memory", Status.WARN, found, "raise the container's limit or choose a smaller model")
    return Check("memory", Status.OK, found)


def kernels() -> Check:
    try:
        from loraserve_kernels.choose_backend import choose_backend
        from loraserve_kernels.cpu_backend import CpuBackend

        backend, reason = choose_backend("cpu")
    except Exception as error:
        return Check("kernels", Status.FAIL, f"{type(error).__name__}: {error}", "reinstall loraserve")
    if not isinstance(backend, CpuBackend):
        return Check("kernels", Status.WARN, reason, "for fast kernels, install a C compiler or a released wheel")
    if backend.library.openmp == "none":
        return Check("kernels", Status.WARN, reason, "install GCC; on macOS, torch from PyPI, which brings OpenMP")
    return Check("kernels", Status.OK, reason)


def gpu_kernels() -> Check:
    """Warns at most, because a server still starts with `--device cpu`."""
    try:
        import torch
        from loraserve_kernels.choose_backend import choose_backend

        if torch.cuda.device_count() == 0:
            return Check("GPU kernels", Status.OK, "no NVIDIA GPU is usable")
        backend, reason = choose_backend("cuda")
    except Exception as error:
        return Check("GPU kernels", Status.WARN, str(error), "to run without the GPU, use --device cpu")
    return Check("GPU kernels", Status.OK if backend.name == "triton" else Status.WARN, reason)


def disk(data_dir: Path) -> Check:
    # os.path: pathlib raises an error for a folder in one that this user may not enter.
    existing = next(path for path in (data_dir, *data_dir.absolute().parents) if os.path.exists(path))
    free = shutil.disk_usage(existing).free
    found = f"{data_dir}: {free / GIB:.1f} GiB free"
    if not _is_writable(existing):
        return Check("data directory", Status.FAIL, f"{existing} is not writable", "choose another --data-dir")
    if free < MIN_FREE_DISK_BYTES:
        return Check("data directory", Status.WARN, found, "free some space: packed adapters are stored there")
    return Check("data directory", Status.OK, found)


def _is_writable(directory: Path) -> bool:
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)


def port_is_free(host: str, port: int) -> Check:
    try:
        bind_tcp(host, port).close()
    except ListenError as error:
        return Check("port", Status.FAIL, str(error))
    return Check("port", Status.OK, f"{host}:{port} is free")


def model_files(model: str) -> Check:
    try:
        directory = Path(model)
        return _directory_files(directory) if directory.is_dir() else _cached_files(model)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return Check("model", Status.FAIL, reason, "copy the whole model to where this user can read it")


def _directory_files(directory: Path) -> Check:
    missing = [name for name in (CONFIG, "tokenizer.json") if not (directory / name).is_file()]
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        missing.append("*.safetensors")
    if missing == ["tokenizer.json"]:
        remedy = "save the tokenizer beside the model, or start the server with --tokenizer"
        return Check("model", Status.WARN, f"{directory} lacks tokenizer.json", remedy)
    if missing:
        remedy = "save the model with save_pretrained"
        return Check("model", Status.FAIL, f"{directory} lacks {', '.join(missing)}", remedy)
    size_bytes = sum(path.stat().st_size for path in weights)
    if (damage := _damage(directory, weights)) is not None:
        return Check("model", Status.FAIL, damage, "copy or download the file again")
    found = f"{directory}: {size_bytes / MIB:.0f} MiB of weights"
    if b'"quantization_config"' not in (directory / CONFIG).read_bytes():
        return Check("model", Status.OK, found)
    return _quantized(directory, found)


def _damage(directory: Path, weights: list[Path]) -> str | None:
    """The first file that is missing, cut off or not what its name says. Reads only the headers of weights."""
    names = {path.name for path in weights}
    is_one_file = WEIGHTS in names
    has_index = not is_one_file and (directory / INDEX).is_file()
    contents: dict[str, Any] = {}
    for name in (CONFIG, INDEX) if has_index else (CONFIG,):
        try:
            contents = json.loads((directory / name).read_bytes())
        except (ValueError, RecursionError) as error:
            return f"{directory / name} is damaged: {error}"
        if not isinstance(contents, dict):
            return f"{directory / name} is damaged: it is not a JSON object"
    used = {WEIGHTS} if is_one_file else names
    if has_index and isinstance(shards := contents.get("weight_map"), dict):
        used = {*map(str, shards.values())}
    if lacking := sorted(used - names):
        return f"{directory} lacks {lacking[0]}, which {INDEX} names"
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return None  # `packages` reports it
    for path in (path for path in weights if path.name in used):
        try:
            with safe_open(path, "numpy"):
                pass
        except SafetensorError as error:
            return f"{path} is damaged: {error}"
    return None


def _quantized(directory: Path, found: str) -> Check:
    """Finds what a start would refuse before it reads the weights."""
    try:
        import torch

        from loraserve.models.errors import ModelRefusedError
        from loraserve.models.loader import load_config, num_weight_bytes
        from loraserve.models.quantized_checkpoint import quantization_method
    except ImportError as error:
        return Check("model", Status.FAIL, f"{directory} cannot be checked: {error}")
    try:
        config = load_config(str(directory), None)
        if (method := quantization_method(config)) is None:
            return Check("model", Status.OK, found)
        size_bytes = num_weight_bytes(config, torch.bfloat16)
    except (ModelRefusedError, ValueError) as error:  # ValueError: the config of no causal model
        return Check("model", Status.FAIL, str(error))
    form = f"{method}; dequantized to bfloat16: {size_bytes / MIB:.0f} MiB"
    return Check("model", Status.OK, f"{found}, quantized with {form}")


def _cached_files(model: str) -> Check:
    """Looks a name up in the local Hugging Face cache; never downloads."""
    try:
        absent = why_absent(model, None)
        found = absent is None and is_cached(model, None)
    except ImportError as error:
        return Check("model", Status.FAIL, f"{model} cannot be looked up: {error}")
    if absent is not None:
        return Check("model", Status.FAIL, absent, "download it first, or give the directory it was saved to")
    if found:
        return Check("model", Status.OK, f"{model} is in the Hugging Face cache")
    # HF_HUB_OFFLINE is set here; its value is left to the Hugging Face library.
    return Check(
        "model",
        Status.WARN,
        f"{model} is not in the Hugging Face cache",
        "download it first, or start with HF_HUB_OFFLINE=0",
    )

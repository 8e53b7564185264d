"""The C functions of `csrc/`, prebuilt or compiled at first use with the system's compiler, called through ctypes.

OpenMP: torch brings its own runtime (`torch/lib/libgomp*.so*` in the wheels). We use whichever runtime the process has
loaded already, so that torch and we share one pool of threads instead of two that spin against each other.
"""

import ctypes
import hashlib
import os
import platform
import re
import stat
import tempfile
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from loraserve_kernels import c_compiler
from loraserve_kernels.c_compiler import NATIVE_FLAG, Compiler, CompilerUnavailable, find_compilers
from loraserve_kernels.cpu_variants import Variant, find_prebuilt

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}

STATUS_MESSAGES = {
    1: "row ranges of segments or sequences are not within the rows of the batch and its block table",
    2: "an adapter slot, rank or offset points outside the adapter table or its arena",
    3: "slot_mapping has an entry outside the KV cache",
    4: "block_table has a block id outside the KV cache within a context",
    6: "this library has no packed linears for the dtype",
}


class PackedLinearStruct(ctypes.Structure):
    """`struct packed_linear` of packed_linear.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("num_outputs", c_int64), ("depth", c_int64))


class LoraGroupStruct(ctypes.Structure):
    """`struct group` of lora_add.h."""

    _fields_ = (("in_features", c_int64), ("num_members", c_int64), ("out_features", c_void_p))


class AdapterTableStruct(ctypes.Structure):
    """`struct table` of lora_add.h."""

    _fields_ = (
        ("arena", c_void_p),
        ("arena_size", c_int64),
        ("offset_a", c_void_p),
        ("stride_a", c_int64),
        ("offset_b", c_void_p),
        ("lora_rank", c_void_p),
        ("scaling", c_void_p),
        ("stride_members", c_int64),
        ("num_slots", c_int64),
    )


class AttentionStruct(ctypes.Structure):
    """`struct attention` of paged_attention.h."""

    _fields_ = (
        ("q", c_void_p),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("context_lens", c_void_p),
        ("row_start", c_void_p),
        ("num_rows", c_void_p),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("num_sequences", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("sliding_window", c_int64),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class RotaryStruct(ctypes.Structure):
    """`struct rotary` of row_ops.h."""

    _fields_ = (
        ("q", c_void_p),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("k", c_void_p),
        ("k_row_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v", c_void_p),
        ("v_row_stride", c_int64),
        ("v_head_stride", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("slot_mapping", c_void_p),
        ("num_rows", c_int64),
        ("num_heads", c_int64),
        ("num_blocks", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
    )


class DecoderLayerStruct(ctypes.Structure):
    """`struct decoder_layer` of decoder_layer.c."""

    _fields_ = (
        ("linears", PackedLinearStruct * 4),
        ("groups", c_void_p * 4),
        ("tables", c_void_p * 4),
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("num_blocks", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("num_heads", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("sliding_window", c_int64),
        ("input_eps", c_float),
        ("mlp_eps", c_float),
        ("q_eps", c_float),
        ("k_eps", c_float),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class LayerStepStruct(ctypes.Structure):
    """`struct layer_step` of decoder_layer.c."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_sequences", c_int64),
        ("max_blocks", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("rotary_dim", c_int64),
        ("slot_mapping", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("context_lens", c_void_p),
        ("row_start", c_void_p),
        ("sequence_rows", c_void_p),
        ("segment_start", c_void_p),
        ("segment_adapter_slot", c_void_p),
        ("num_segments", c_int64),
    )


POINTER_STRIDE = [c_void_p, c_int64]
SIGNATURES = {
    "lora_add": [*POINTER_STRIDE * 2, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int],
    "kv_write": [*[c_void_p, c_int64, c_int64] * 2, *[c_void_p] * 3, *[c_int64] * 5, c_int, c_int],
    "paged_attention": [c_void_p, c_int64, c_int64, c_int, c_int],
    "rotary_kv_write": [c_void_p, c_int, c_int],
    "rms_norm": [c_void_p, c_void_p, *[c_int64] * 4, c_void_p, c_int64, c_float, c_int, c_int],
    "linear_rowmajor": [*POINTER_STRIDE * 2, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int, c_int],
    "silu_mul": [c_void_p, *POINTER_STRIDE * 2, c_int64, c_int64, c_int, c_int],
    "pack_weight": [c_void_p, c_void_p, c_int64, c_int64, c_int, c_int],
    "packed_weight_bytes": [c_int64, c_int64, c_int],
    "packed_linear": [c_void_p, *POINTER_STRIDE * 2, c_int64, c_int, c_int],
    "decoder_layer": [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int],
}


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """A loaded library. `functions` are called with integers for pointers and return a status code."""

    path: Path
    origin: str
    """Where it comes from: a prebuilt variant, or the compiler that built it here."""
    openmp: str
    """Path of the runtime shared with torch, "own" for the compiler's, "none" when single-threaded."""
    functions: ctypes.CDLL


@dataclass(frozen=True, slots=True)
class Build:
    """One way to compile for this CPU: which compiler, with or without OpenMP and whose runtime."""

    compiler: Compiler
    openmp: str

    def key(self) -> str:
        """Names the result: same sources, flags, CPU and compiler, same key."""
        digest = hashlib.sha256()
        for source in sorted(c_compiler.SOURCE_DIR.iterdir()):
            digest.update(f"{source.name}\0".encode() + source.read_bytes())
        command, version = self.compiler.command, self.compiler.version
        flags = (*c_compiler.FLAGS, NATIVE_FLAG)
        digest.update("\0".join((*command, *flags, version, self.openmp, cpu_description())).encode())
        return digest.hexdigest()[:32]

    def run(self, directory: Path) -> Path:
        """Compile into `directory`. Raises `CompilerUnavailable`."""
        compile_openmp = () if self.openmp == "none" else ("-fopenmp",)
        runtime = {"none": (), "own": ("-fopenmp",)}.get(self.openmp, (self.openmp,))
        target = directory / f"{self.key()}.so"
        self.compiler.build(target, (NATIVE_FLAG, *compile_openmp), runtime)
        return target


def load_cpu_library(cache_dir: Path | None = None) -> CpuLibrary:
    """The C functions: prebuilt for this CPU, else compiled, unless `cache_dir` has them already.

    cache_dir defaults to `$XDG_CACHE_HOME/loraserve` or `~/.cache/loraserve`. A directory that is not writable, or that
    somebody else could put a library into, is replaced by a private temporary one.

    Prebuilt comes first because it is as fast as `-march=native` and saves three seconds of compiling: see ADR 0005.
    Raises `CompilerUnavailable`.
    """
    reasons: list[str] = []
    for variant, path in find_prebuilt():
        try:
            return open_prebuilt(variant, path)
        except OSError as error:
            reasons.append(f"{variant.name}: {error}")
    candidates = list(builds())
    if not candidates:
        raise CompilerUnavailable("; ".join([*reasons, "no C compiler found (looked for $CC, cc, gcc, clang)"]))
    directory = private_directory(cache_dir)
    for build in candidates:
        cached = directory / f"{build.key()}.so"
        for path in [cached] if cached.exists() else []:
            try:
                return open_build(path, build)
            except OSError:
                pass  # damaged: build again
        try:
            return open_build(build.run(directory), build)
        except (CompilerUnavailable, OSError) as error:
            reasons.append(str(error))
    raise CompilerUnavailable("; ".join(reasons))


def open_build(path: Path, build: Build) -> CpuLibrary:
    """Load what `build` compiled. Raises `OSError` when the file or its OpenMP runtime does not load."""
    return CpuLibrary(path, f"built with {build.compiler.version}", build.openmp, open_functions(path))


def open_prebuilt(variant: Variant, path: Path) -> CpuLibrary:
    """Load a variant, which names no OpenMP runtime: its symbols are found in torch's, made global here.

    A runtime named when the wheel is built could not be torch's: that one's file name differs between torch's wheels.
    Raises `OSError` when the file does not load or the runtime has not what it needs.
    """
    runtime = str(loaded_openmp_runtime() or "libgomp.so.1")
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    return CpuLibrary(path, f"prebuilt for {variant.name}", runtime, open_functions(path))


def open_functions(path: Path) -> ctypes.CDLL:
    """Load and declare the functions. Raises `OSError`."""
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int64 if name == "packed_weight_bytes" else c_int
    return library


def builds() -> Iterator[Build]:
    """Every compiler found, each with torch's OpenMP runtime, then its own, then none; best first."""
    runtime = loaded_openmp_runtime()
    compilers = list(find_compilers())
    for openmp in ([str(runtime)] if runtime else []) + ["own", "none"]:
        for compiler in compilers:
            yield Build(compiler, openmp)


def loaded_openmp_runtime() -> Path | None:
    """The OpenMP library this process has mapped, torch's own if there are several; None where that cannot be read."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = sorted(set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so[^/\s]*", maps)))
    return Path(min(paths, key=lambda path: "/torch/" not in path)) if paths else None


def cpu_description() -> str:
    """The instruction sets of this machine: a cache shared between machines must not mix their builds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    first = {
        name: value for name, _, value in (line.partition(":") for line in reversed(lines)) if name.strip() in wanted
    }
    return platform.machine() + str(sorted(first.items()))


def private_directory(cache_dir: Path | None) -> Path:
    """cache_dir (or the default) if only we can write to it, else a new temporary directory."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loraserve"
    directory = cache_dir or base
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid == os.getuid() and not others_write and os.access(directory, os.W_OK):
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="loraserve-"))


def raise_for(status: int) -> None:
    """Turn a status of the C functions into an exception."""
    if status == 0:
        return
    message = STATUS_MESSAGES.get(status)
    if message is None:
        raise MemoryError(f"CPU kernel failed with status {status}: no memory for its scratch space")
    raise ValueError(message)

"""The C functions of `csrc/`, compiled at first use with the system's compiler and called through ctypes.

OpenMP: torch brings its own runtime (`torch/lib/libgomp*.so*` in the wheels). We link against whichever runtime the
process has loaded already, so that torch and we share one pool of threads instead of two that spin against each other.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE_DIR = Path(__file__).parent / "csrc"
NATIVE_FLAG = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", NATIVE_FLAG)
COMPILE_TIMEOUT_S = 300.0

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}

STATUS_MESSAGES = {
    1: "row ranges of segments or sequences are not within the rows of the batch and its block table",
    2: "an adapter slot, rank or offset points outside the adapter table or its arena",
    3: "slot_mapping has an entry outside the KV cache",
    4: "block_table has a block id outside the KV cache within a context",
}


class CompilerUnavailable(RuntimeError):
    """The CPU kernels cannot be built here; the message says why."""


class LoraGroupStruct(ctypes.Structure):
    """`struct group` of lora_add.c."""

    _fields_ = (("in_features", c_int64), ("num_members", c_int64), ("out_features", c_void_p))


class AdapterTableStruct(ctypes.Structure):
    """`struct table` of lora_add.c."""

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
    """`struct problem` of paged_attention.c."""

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
    """`struct rotary` of rotary_kv_write.c."""

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


POINTER_STRIDE = [c_void_p, c_int64]
SIGNATURES = {
    "lora_add": [*POINTER_STRIDE * 2, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int],
    "kv_write": [*[c_void_p, c_int64, c_int64] * 2, *[c_void_p] * 3, *[c_int64] * 5, c_int, c_int],
    "paged_attention": [c_void_p, c_int64, c_int64, c_int, c_int],
    "rotary_kv_write": [c_void_p, c_int, c_int],
    "rms_norm": [c_void_p, c_void_p, *[c_int64] * 4, c_void_p, c_int64, c_float, c_int, c_int],
    "linear_rowmajor": [*POINTER_STRIDE * 2, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int, c_int],
    "silu_mul": [c_void_p, *POINTER_STRIDE * 2, c_int64, c_int64, c_int, c_int],
}


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """A loaded build. `functions` are called with integers for pointers and return a status code."""

    path: Path
    compiler: str
    """First line of the compiler's --version."""
    openmp: str
    """Path of the runtime shared with torch, "own" for the compiler's, "none" when single-threaded."""
    functions: ctypes.CDLL


@dataclass(frozen=True, slots=True)
class Build:
    """One way to compile: which compiler, with or without OpenMP and whose runtime."""

    command: tuple[str, ...]
    version: str
    openmp: str

    def key(self) -> str:
        """Names the result: same sources, flags, CPU and compiler, same key."""
        digest = hashlib.sha256()
        for source in sorted(SOURCE_DIR.iterdir()):
            digest.update(f"{source.name}\0".encode() + source.read_bytes())
        digest.update("\0".join((*self.command, *FLAGS, self.version, self.openmp, cpu_description())).encode())
        return digest.hexdigest()[:32]

    def run(self, directory: Path) -> Path:
        """Compile into `directory`, atomically: two processes may build at once. Raises `CompilerUnavailable`."""
        compile_openmp = () if self.openmp == "none" else ("-fopenmp",)
        runtime = {"none": (), "own": ("-fopenmp",)}.get(self.openmp, (self.openmp,))
        with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as work:
            sources = [str(path) for path in sorted(SOURCE_DIR.glob("*.c"))]
            self._execute(work, *FLAGS, *compile_openmp, "-c", *sources)
            objects = [f"{Path(source).stem}.o" for source in sources]
            self._execute(work, "-shared", "-o", "library.so", *objects, *runtime, "-lm")
            target = directory / f"{self.key()}.so"
            os.replace(Path(work) / "library.so", target)
        return target

    def _execute(self, work: str, *arguments: str) -> None:
        command = [*self.command, *arguments]
        try:
            result = subprocess.run(
                command, cwd=work, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerUnavailable(f"{self.command[0]}: {error}") from error
        if result.returncode != 0:
            reason = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()
            raise CompilerUnavailable(
                f"{self.command[0]} failed: {next((r for r in reason if 'error' in r), reason[0])}"
            )


def load_cpu_library(cache_dir: Path | None = None) -> CpuLibrary:
    """The C functions, compiled unless `cache_dir` has them already. Raises `CompilerUnavailable`.

    cache_dir defaults to `$XDG_CACHE_HOME/loraserve` or `~/.cache/loraserve`. A directory that is not writable, or that
    somebody else could put a library into, is replaced by a private temporary one.
    """
    reasons: list[str] = []
    directory = private_directory(cache_dir)
    for build in builds():
        cached = directory / f"{build.key()}.so"
        for path in [cached] if cached.exists() else []:
            try:
                return open_library(path, build)
            except OSError:
                pass  # damaged: build again
        try:
            return open_library(build.run(directory), build)
        except (CompilerUnavailable, OSError) as error:
            reasons.append(str(error))
    raise CompilerUnavailable("; ".join(reasons) or "no C compiler found (looked for $CC, cc, gcc, clang)")


def open_library(path: Path, build: Build) -> CpuLibrary:
    """Load and declare the functions. Raises `OSError` when the file or its OpenMP runtime does not load."""
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int
    return CpuLibrary(path, build.version, build.openmp, library)


def builds() -> Iterator[Build]:
    """Every compiler found, each with torch's OpenMP runtime, then its own, then none; best first."""
    runtime = loaded_openmp_runtime()
    found: dict[str, tuple[str, ...]] = {}
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        command = tuple(shlex.split(candidate))
        path = shutil.which(command[0]) if command else None
        if path is not None:
            found.setdefault(os.path.realpath(path), (path, *command[1:]))
    for openmp in ([str(runtime)] if runtime else []) + ["own", "none"]:
        for command in found.values():
            yield Build(command, compiler_version(command), openmp)


def compiler_version(command: tuple[str, ...]) -> str:
    """First line of --version, or "unknown"."""
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.partition("\n")[0].strip() or "unknown"


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

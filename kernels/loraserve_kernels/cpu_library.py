"""The C functions of `csrc/`, prebuilt or compiled at first use with the system's compiler, called through ctypes."""

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

from loraserve_kernels.c_compiler import CompilerUnavailable
from loraserve_kernels.cpu_builds import Build, builds, is_noexec, loaded_openmp_runtime, private_directory
from loraserve_kernels.cpu_calls import open_functions
from loraserve_kernels.cpu_variants import Variant, find_prebuilt


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """A loaded library. `functions` are called with integers for pointers and return a status code."""

    path: Path
    origin: str
    """Where it comes from: a prebuilt variant, or the compiler that built it here."""
    openmp: str
    """Path of the runtime shared with torch, "own" for the compiler's, "none" when single-threaded."""
    functions: ctypes.CDLL
    has_amx: bool
    """Whether linears and attention in bfloat16 use it: the CPU has it, the system allows it, the compiler knew it."""


def load_cpu_library(cache_dir: Path | None = None) -> CpuLibrary:
    """The C functions: prebuilt for this CPU, else compiled, unless `cache_dir` has them already.

    cache_dir defaults to `$XDG_CACHE_HOME/loraserve` or `~/.cache/loraserve`. A directory that is not writable, or that
    somebody else could put a library into, or that no library can be loaded from, is replaced by a private temporary
    one.

    Prebuilt comes first because it is as fast as `-march=native` and needs no compiling: see ADR 0005.
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
    if is_noexec(directory):
        # Finding it out by trying took three compilations at each start: 50 s on two cores.
        directory.rmdir()
        raise CompilerUnavailable(
            f"{directory.parent} is mounted noexec: set TMPDIR to a folder that is not, or install a released wheel"
        )
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
    if sys.platform == "darwin" and build.openmp != "none":
        ctypes.CDLL(build.openmp, mode=ctypes.RTLD_GLOBAL)  # the library finds its symbols by their names
    functions = open_functions(path)
    origin = f"built with {build.compiler.version}"
    return CpuLibrary(path, origin, build.openmp, functions, bool(functions.amx_enable(1)))


def open_prebuilt(variant: Variant, path: Path) -> CpuLibrary:
    """Load a variant, which names no OpenMP runtime: its symbols are found in torch's, made global here.

    A runtime named when the wheel is built could not be torch's: that one's file name differs between torch's wheels.
    Raises `OSError` when the file does not load or the runtime has not what it needs.
    """
    runtime = str(loaded_openmp_runtime() or "libgomp.so.1")
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    functions = open_functions(path)
    return CpuLibrary(path, f"prebuilt for {variant.name}", runtime, functions, bool(functions.amx_enable(1)))

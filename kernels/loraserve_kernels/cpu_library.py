"""The C functions of `csrc/`, called through ctypes: prebuilt, or compiled at first use with the system's compiler."""

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
    """A loaded library. `functions` take pointers as integers and return a status code."""

    path: Path
    origin: str
    """The prebuilt variant, or the compiler that built the library here."""
    openmp: str
    """Path of the runtime shared with torch, "own" for the compiler's, "none" when single-threaded."""
    functions: ctypes.CDLL
    has_amx: bool
    """Whether bfloat16 linears and attention use AMX: the CPU has it, the system allows it, the compiler knew it."""


def load_cpu_library(cache_dir: Path | None = None) -> CpuLibrary:
    """The C functions: prebuilt for this CPU, else from `cache_dir`, else compiled into it.

    cache_dir defaults to `$XDG_CACHE_HOME/loraserve` or `~/.cache/loraserve`. A directory that is not writable, into
    which others could write a library, or from which no library can be loaded is replaced by a private temporary one.

    Prebuilt comes first because it is as fast as `-march=native` and needs no compiling: see ADR 5.
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
        # Without this check, each start compiled three times before failing: 50 s on two cores.
        directory.rmdir()
        raise CompilerUnavailable(
            f"{directory.parent} is mounted noexec: set TMPDIR to another folder, or install a released wheel"
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
    """Load the library that `build` compiled. Raises `OSError` if the file or its OpenMP runtime does not load."""
    if sys.platform == "darwin" and build.openmp != "none":
        ctypes.CDLL(build.openmp, mode=ctypes.RTLD_GLOBAL)  # the library resolves its symbols by name
    functions = open_functions(path)
    origin = f"built with {build.compiler.version}"
    return CpuLibrary(path, origin, build.openmp, functions, bool(functions.amx_enable(1)))


def open_prebuilt(variant: Variant, path: Path) -> CpuLibrary:
    """Load a variant. It names no OpenMP runtime: its symbols are resolved in torch's, which is made global here.

    The wheel could not name torch's runtime when it was built: that file's name differs between torch's wheels.
    Raises `OSError` if the file does not load or the runtime lacks a symbol.
    """
    runtime = str(loaded_openmp_runtime() or "libgomp.so.1")
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    functions = open_functions(path)
    return CpuLibrary(path, f"prebuilt for {variant.name}", runtime, functions, bool(functions.amx_enable(1)))

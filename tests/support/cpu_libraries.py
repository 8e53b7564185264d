"""The C functions compiled as in a wheel, for CPUs with fewer instructions than this one."""

import fcntl
import os
import platform
import sys
from pathlib import Path

import pytest
from loraserve_kernels.c_compiler import Compiler, find_compilers
from loraserve_kernels.cpu_builds import private_directory
from loraserve_kernels.cpu_library import CpuLibrary, load_cpu_library, open_prebuilt
from loraserve_kernels.cpu_variants import Variant, cpu_flags, usable_variants

COMPILE_ONCE = Path(__file__).with_name("compile_once.py")


def compiling_once(compiler: Compiler) -> Compiler:
    """Compiles only new objects: wheels, these libraries and those of other runs have objects in common."""
    folder = private_directory(None) / "objects-of-tests"
    return Compiler((sys.executable, "-ISs", str(COMPILE_ONCE), str(folder), *compiler.command), compiler.version)


def native_library() -> CpuLibrary:
    """The library for this very CPU; workers that start together do not each compile it."""
    with (private_directory(None) / "lock-of-tests").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return load_cpu_library()


def narrowest_variant() -> Variant | None:
    """The narrowest that this CPU can run: AVX2 on x86."""
    variants = usable_variants(platform.machine(), cpu_flags())
    return variants[-1] if variants else None


def library_of(
    variant: Variant | None, tmp_path_factory: pytest.TempPathFactory, name: str = "library", *flags: str
) -> CpuLibrary:
    """Compiled once for all workers."""
    compiler = next(find_compilers(), None)
    if compiler is None or variant is None:
        pytest.skip("needs a C compiler and a CPU with the variant")
    own_folder = tmp_path_factory.getbasetemp()
    folder = own_folder.parent if "PYTEST_XDIST_WORKER" in os.environ else own_folder
    path = folder / f"{name}-{variant.file_name}"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compiling_once(compiler).build(path, (*variant.compile_flags, "-fopenmp", *flags))
    try:
        return open_prebuilt(variant, path)
    except OSError as error:
        pytest.skip(f"{compiler.version} does not use torch's OpenMP runtime: {error}")

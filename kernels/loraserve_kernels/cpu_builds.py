"""Compile the C functions for this CPU: the compilers and OpenMP runtimes to use, and where the result is cached.

OpenMP: torch's wheels contain a runtime (`torch/lib/libgomp*.so*`). We use the runtime that the process has already
loaded, so that torch and we share one thread pool instead of two that spin against each other. On macOS we use the
wheel's `torch/lib/libomp.dylib` or none: a second runtime, such as a compiler's, aborts the process. Decoder layers and
models use their own threads, see `csrc/team.c`.
"""

import hashlib
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from loraserve_kernels import c_compiler
from loraserve_kernels.c_compiler import NATIVE_FLAG, Compiler, find_compilers
from loraserve_kernels.macos import sysctl

_OPENMP = re.compile(r"/.*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so[^/\s]*")


@dataclass(frozen=True, slots=True)
class Build:
    """One way to compile for this CPU: a compiler and an OpenMP runtime."""

    compiler: Compiler
    openmp: str

    def key(self) -> str:
        """Cache key of the result: a hash of the sources, flags, CPU, compiler and OpenMP runtime."""
        digest = hashlib.sha256()
        for source in sorted(c_compiler.SOURCE_DIR.iterdir()):
            digest.update(f"{source.name}\0".encode() + source.read_bytes())
        command, version = self.compiler.command, self.compiler.version
        flags = (*c_compiler.FLAGS, NATIVE_FLAG)
        digest.update("\0".join((*command, *flags, version, self.openmp, cpu_description())).encode())
        return digest.hexdigest()[:32]

    def run(self, directory: Path) -> Path:
        """Compile into `directory`. Raises `CompilerUnavailable`."""
        target = directory / f"{self.key()}.so"
        compile_openmp, link_openmp = self.openmp_flags()
        self.compiler.build(target, (NATIVE_FLAG, *compile_openmp), link_openmp)
        return target

    def openmp_flags(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(compiler flags, linker flags). On macOS none names the runtime: `open_build` loads it before the library."""
        if self.openmp == "none":
            return (), ()
        if sys.platform == "darwin":
            return ("-Xclang", "-fopenmp"), ("-Wl,-undefined,dynamic_lookup",)  # Apple's clang rejects plain -fopenmp
        return ("-fopenmp",), ("-fopenmp" if self.openmp == "own" else self.openmp,)


def builds() -> Iterator[Build]:
    """All compilers with the loaded OpenMP runtime, then with their own (not on macOS), then without; best first."""
    runtime = loaded_openmp_runtime()
    compilers = list(find_compilers())
    others = ["none"] if sys.platform == "darwin" else ["own", "none"]
    for openmp in ([str(runtime)] if runtime else []) + others:
        for compiler in compilers:
            yield Build(compiler, openmp)


def loaded_openmp_runtime(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """The OpenMP library that this process has mapped, torch's if there are several; None if none is found.

    On macOS, the one in torch's wheel, which torch loads.
    """
    if sys.platform == "darwin":
        torch = find_spec("torch")
        path = Path(torch.origin).parent / "lib" / "libomp.dylib" if torch and torch.origin else None
        return path if path and path.is_file() else None
    try:
        mappings = [line.split(maxsplit=5) for line in os.fsdecode(maps.read_bytes()).splitlines()]
    except OSError:
        return None
    paths = sorted({fields[5] for fields in mappings if len(fields) == 6 and _OPENMP.fullmatch(fields[5])})
    return Path(min(paths, key=lambda path: "/torch/" not in path)) if paths else None


def cpu_description() -> str:
    """Identifies this machine's CPU: a cache shared between machines must not mix their builds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor() + sysctl("machdep.cpu.brand_string")
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    first = {
        name: value for name, _, value in (line.partition(":") for line in reversed(lines)) if name.strip() in wanted
    }
    return platform.machine() + str(sorted(first.items()))


def private_directory(cache_dir: Path | None) -> Path:
    """cache_dir (or the default) if only we can write to it and libraries load from it, else a new temporary one."""
    try:
        directory = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loraserve"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_ours = status.st_uid == os.getuid() and not others_write and os.access(directory, os.W_OK)
        if is_ours and not is_noexec(directory):
            return directory
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        pass
    return Path(tempfile.mkdtemp(prefix="loraserve-"))


def is_noexec(directory: Path) -> bool:
    """Whether it is mounted noexec, so that no library loads from it; False if the system does not report that."""
    return bool(os.statvfs(directory).f_flag & getattr(os, "ST_NOEXEC", 0))

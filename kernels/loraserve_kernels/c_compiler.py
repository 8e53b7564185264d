"""The system's C compiler and how it compiles `csrc/`.

Standard library only: `hatch_build.py` uses it to compile released wheels, without torch installed.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from loraserve_kernels.macos import has_command_line_tools

SOURCE_DIR = Path(__file__).parent / "csrc"
NATIVE_FLAG = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden")
COMPILE_TIMEOUT_S = 300.0
MAX_PARALLEL_FILES = 8
"""Concurrent compiler processes. GCC 12 takes up to 150 MB per file; a container may lack that for each host CPU."""


class CompilerUnavailable(RuntimeError):
    """The CPU kernels cannot be built here; the message says why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A command that compiles C, and the first line of its --version."""

    command: tuple[str, ...]
    version: str

    def build(self, target: Path, compile_flags: Iterable[str], link_flags: Sequence[str] = ()) -> None:
        """Compile all sources into the shared library `target`, atomically: two processes may build at once.

        Raises `CompilerUnavailable`.
        """
        # The slowest first, so that small files fill the idle time at the end.
        sources = sorted(SOURCE_DIR.glob("*.c"), key=_effort, reverse=True)
        flags = (*FLAGS, *compile_flags)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as work:
            with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_PARALLEL_FILES)) as pool:
                for _ in pool.map(lambda source: self._execute(work, *flags, "-c", str(source)), sources):
                    pass
            objects = sorted(f"{source.stem}.o" for source in sources)
            self._execute(work, "-shared", "-o", "library.so", *objects, *link_flags, "-pthread", "-lm")
            os.replace(Path(work) / "library.so", target)

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


def _effort(source: Path) -> tuple[bool, int, str]:
    """Sort key for compile time: file size, but short files expanded for many cases ("products") take longest."""
    return "products" in source.stem, source.stat().st_size, source.name


def find_compilers() -> Iterator[Compiler]:
    """Those of $CC, cc, gcc and clang that exist; each executable once."""
    found: set[str] = set()
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        command = tuple(shlex.split(candidate))
        path = shutil.which(command[0]) if command else None
        if path is None or os.path.realpath(path) in found or _opens_dialog(path):
            continue
        found.add(os.path.realpath(path))
        yield Compiler((path, *command[1:]), compiler_version((path, *command[1:])))


def _opens_dialog(path: str) -> bool:
    """Whether it is only the macOS stub that offers to install a compiler."""
    return sys.platform == "darwin" and path.startswith("/usr/bin/") and not has_command_line_tools()


def compiler_version(command: tuple[str, ...]) -> str:
    """First line of --version, or "unknown"."""
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.partition("\n")[0].strip() or "unknown"

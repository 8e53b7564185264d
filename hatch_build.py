"""Adds the compiled CPU libraries to a released wheel: LORASERVE_PREBUILD=1 pip wheel . (or `make wheel`).

Without that variable a wheel or an editable install is pure Python and needs no compiler.
"""

import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

from loraserve_kernels.c_compiler import CompilerUnavailable, find_compilers
from loraserve_kernels.cpu_variants import VARIANTS, Variant


class PrebuildHook(BuildHookInterface):
    """Compiles every variant for this machine's architecture."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("LORASERVE_PREBUILD", "") in ("", "0"):
            return
        variants = [variant for variant in VARIANTS if variant.machine == platform.machine()]
        if sys.platform != "linux" or not variants:
            raise RuntimeError(f"LORASERVE_PREBUILD: no variants for {sys.platform} on {platform.machine()}")
        self._work = tempfile.TemporaryDirectory(prefix="loraserve-prebuilt-")
        for variant in variants:
            path = compile_variant(variant, Path(self._work.name))
            build_data["force_include"][str(path)] = f"loraserve_kernels/prebuilt/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_work"):
            self._work.cleanup()


def compile_variant(variant: Variant, directory: Path) -> Path:
    """The variant's library, which leaves GCC's OpenMP functions undefined: torch's runtime provides them.

    Raises `CompilerUnavailable` with the reason of every compiler.
    """
    reasons: list[str] = []
    for compiler in find_compilers():
        path = directory / variant.file_name
        try:
            compiler.build(path, (*variant.compile_flags, "-fopenmp"), ("-s",))
        except CompilerUnavailable as error:
            reasons.append(str(error))
            continue
        content = path.read_bytes()
        if b"GOMP_parallel" in content and b"__kmpc_" not in content:
            return path
        reasons.append(f"{compiler.version} calls another OpenMP runtime than GCC's")
    raise CompilerUnavailable(f"{variant.name}: {'; '.join(reasons) or 'no C compiler found'}")

"""No C function reads or writes outside its arguments, or has undefined behavior."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loraserve_kernels.c_compiler import Compiler, find_compilers

from tests.support.cpu_libraries import compiling_once, narrowest_variant

ROOT = Path(__file__).parents[2]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
FAST_TO_COMPILE = "-O0"


def runtimes(compiler: Compiler) -> list[str]:
    """The libraries to load before all others; none if the compiler is not GCC or lacks them."""
    found = [
        subprocess.run([*compiler.command, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    is_gcc = "clang" not in compiler.version
    return found if is_gcc and all(map(os.path.isabs, found)) else []


@pytest.mark.slow
def test_c_functions_touch_only_their_arguments_and_have_no_undefined_behavior(tmp_path):
    compiler, variant = next(find_compilers(), None), narrowest_variant()
    if compiler is None or variant is None or not runtimes(compiler):
        pytest.skip("needs GCC with the AddressSanitizer")
    library = tmp_path / "sanitized.so"
    compiling_once(compiler).build(library, (*variant.compile_flags, "-fopenmp", FAST_TO_COMPILE, *SANITIZERS))
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes(compiler)),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps some memory until it ends
        "PYTHONMALLOC": "malloc",  # otherwise ctypes' arrays have neighbors in Python's pools
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "adapters")),
    }
    program = Path(__file__).with_name("sanitized_ops.py")
    ran = subprocess.run([sys.executable, str(program), str(library)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-8000:]

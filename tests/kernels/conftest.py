import importlib.util
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.c_compiler import CompilerUnavailable, find_compilers
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary, load_cpu_library, open_prebuilt
from loraserve_kernels.cpu_variants import cpu_flags, usable_variants
from loraserve_kernels.reference_backend import ReferenceBackend


@pytest.fixture(scope="session")
def assert_close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """`tolerances.assert_close`; test folders are no packages, so it is loaded by path."""
    spec = importlib.util.spec_from_file_location("tolerances", Path(__file__).with_name("tolerances.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.assert_close


@pytest.fixture(scope="session")
def cpu_library() -> CpuLibrary:
    try:
        return load_cpu_library()
    except CompilerUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def narrowest_library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    """The C functions as a wheel brings them for old CPUs: AVX2 where `cpu_library` is AVX-512."""
    compiler = next(find_compilers(), None)
    variants = usable_variants(platform.machine(), cpu_flags())
    if compiler is None or not variants:
        pytest.skip("needs a C compiler and a CPU with a variant")
    path = tmp_path_factory.mktemp("narrowest") / variants[-1].file_name
    compiler.build(path, (*variants[-1].compile_flags, "-fopenmp"))
    try:
        return open_prebuilt(variants[-1], path)
    except OSError as error:
        pytest.skip(f"{compiler.version} does not use torch's OpenMP runtime: {error}")


@pytest.fixture(params=["reference", "cpu", pytest.param("cpu-narrowest", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each implementation in turn: one contract suite for all."""
    if request.param == "reference":
        return ReferenceBackend()
    return CpuBackend(request.getfixturevalue("cpu_library" if request.param == "cpu" else "narrowest_library"))


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param

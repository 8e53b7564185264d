import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CompilerUnavailable, CpuLibrary, load_cpu_library
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


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each implementation in turn: one contract suite for all."""
    if request.param == "reference":
        return ReferenceBackend()
    return CpuBackend(request.getfixturevalue("cpu_library"))


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param

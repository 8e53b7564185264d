import importlib
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.c_compiler import CompilerUnavailable
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.cpu_variants import Variant, cpu_flags, usable_variants
from loraserve_kernels.host_sampling import ReferenceSampling, SamplesOnHost
from loraserve_kernels.kv_float8 import KV_FLOAT8
from loraserve_kernels.reference_backend import ReferenceBackend

from tests.support.cpu_libraries import library_of, narrowest_variant, native_library
from tests.support.interpreted_float8 import convert_as_a_gpu
from tests.support.interpreter_speed import speed_up_interpreter
from tests.support.poison import poison_new_tensors
from tests.support.triton_launches import checked_replay

HAS_GPU = torch.cuda.is_available()
HAS_AMX = "amx_bf16" in cpu_flags()
SUPPORT = Path(__file__).parents[1] / "support"
EMULATED_AMX = SUPPORT / "emulated_amx.h"
EMULATED_AVX_VNNI = SUPPORT / "emulated_avx_vnni.h"

# A machine used for its GPU may lack hypothesis, and neither of these files needs a GPU.
collect_ignore = [] if importlib.util.find_spec("hypothesis") else ["test_attention_work.py", "test_lora_tiles.py"]

if not HAS_GPU:
    # Triton reads this when its tests or transformers import it: nothing above may import Triton or transformers.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If there is a GPU, marks tests of Triton's kernels as needing it; otherwise deselects those with bfloat16.

    The interpreter multiplies bfloat16's bits as if they were integers.
    """
    left_out = []
    for item in items:
        if not uses_triton(item):
            continue
        if HAS_GPU:
            item.add_marker(pytest.mark.gpu)
        elif any(value is torch.bfloat16 for value in parameters(item).values()):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def uses_triton(item: pytest.Item) -> bool:
    is_direct = isinstance(item, pytest.Function) and "triton_device" in item.fixturenames
    return is_direct or parameters(item).get("backend") == "triton"


@pytest.fixture(autouse=True)
def _outputs_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisons the results and intermediates that ops allocate, so that elements they fail to write show."""
    poison_new_tensors(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def _interpreter_is_fast() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not HAS_GPU and importlib.util.find_spec("triton") is not None:
            speed_up_interpreter(monkeypatch)
        yield


@pytest.fixture(scope="session")
def triton_device() -> str:
    """The device on which tests of Triton's kernels put their tensors."""
    if os.environ.get("CI"):
        importlib.import_module("triton")  # raises if missing: skipped tests would look like passing ones
    pytest.importorskip("triton")
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def assert_close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """`tolerances.assert_close`; test folders are not packages, so it is loaded by path."""
    spec = importlib.util.spec_from_file_location("tolerances", Path(__file__).with_name("tolerances.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.assert_close


@pytest.fixture(scope="session")
def cpu_library() -> CpuLibrary:
    try:
        return native_library()
    except CompilerUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def narrowest_library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    """The C functions as in a wheel, compiled for old CPUs: AVX2 if `cpu_library` is AVX-512."""
    return library_of(narrowest_variant(), tmp_path_factory)


@pytest.fixture(scope="session")
def avx512_library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    """Vectors of 16 elements; bfloat16 only via float32."""
    return library_of(variant_called("x86-64-v4"), tmp_path_factory)


@pytest.fixture(scope="session")
def avx512_vnni_library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    """Like `avx512_library`, with one instruction for sums of integer products."""
    return library_of(variant_called("x86-64-v4-vnni"), tmp_path_factory)


@pytest.fixture(scope="session")
def avx_vnni_library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    """The same instruction for vectors of 8 elements, emulated on a CPU that lacks it."""
    if (variant := variant_called("x86-64-v3-vnni")) is not None:
        return library_of(variant, tmp_path_factory)
    emulation = "-include", str(EMULATED_AVX_VNNI)
    return library_of(variant_called("x86-64-v3"), tmp_path_factory, "emulated-vnni", *emulation)


def variant_called(name: str) -> Variant | None:
    """The variant of this name; None if this CPU cannot run it."""
    return next((v for v in usable_variants(platform.machine(), cpu_flags()) if v.name == name), None)


@pytest.fixture(scope="session")
def four_lanes_library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    """Vectors of 4 elements, as on Arm; on x86 too."""
    on_x86 = Variant("x86-64-v2", "x86_64", ("-march=x86-64-v2",), frozenset({"sse4_2"}))
    variants = usable_variants(platform.machine(), cpu_flags())
    variant = on_x86 if platform.machine() == "x86_64" else next(iter(variants), None)
    return library_of(variant, tmp_path_factory)


@pytest.fixture(scope="session")
def amx_library(cpu_library: CpuLibrary, tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    """The C functions with AMX, whose instructions are emulated if the CPU lacks nothing else."""
    if cpu_library.has_amx:
        return cpu_library
    variant = next(iter(usable_variants(platform.machine(), cpu_flags())), None)
    if variant is None or "avx512_bf16" not in variant.cpu_flags:
        pytest.skip("needs AMX, or a C compiler and a CPU with AVX-512 products of bfloat16")
    library = library_of(variant, tmp_path_factory, "emulated-amx", f'-DEMULATED_AMX="{EMULATED_AMX}"')
    assert library.has_amx
    return library


@pytest.fixture(params=["amx", "no-amx", "narrowest"])
def library(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    """The C functions with AMX, without AMX as if the CPU or the system did not allow it, and for old CPUs."""
    yield from _library(request)


@pytest.fixture(params=["amx", "no-amx", "avx512", "narrowest", "four_lanes"])
def any_library(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    """Those of `library` and all other kinds: for code that is written separately for each."""
    yield from _library(request)


@pytest.fixture(params=["cpu", "narrowest", "four_lanes"])
def lanes_library(request: pytest.FixtureRequest) -> CpuLibrary:
    """The C functions with each length of vectors."""
    return request.getfixturevalue(f"{request.param}_library")


def _library(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    if request.param != "no-amx":
        yield request.getfixturevalue(f"{request.param}_library")
        return
    library: CpuLibrary = request.getfixturevalue("cpu_library")
    with amx_set(library, enabled=False):
        yield library


@contextmanager
def amx_set(library: CpuLibrary, *, enabled: bool) -> Iterator[None]:
    library.functions.amx_enable(enabled)
    yield
    library.functions.amx_enable(library.has_amx)


IMPLEMENTATIONS = ["reference", "cpu", pytest.param("cpu-narrowest", marks=pytest.mark.slow), "triton"]


@pytest.fixture(params=[*IMPLEMENTATIONS, "cpu-no-amx" if HAS_AMX else "cpu-amx"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each implementation in turn, so that one contract suite covers all."""
    if request.param == "cpu-no-amx":
        library: CpuLibrary = request.getfixturevalue("cpu_library")
        with amx_set(library, enabled=False):
            yield CpuBackend(library)
        return
    yield _backend(request)


def _backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "reference":
        return ReferenceBackend()
    if request.param == "triton":
        request.getfixturevalue("triton_device")
        from loraserve_kernels.triton_backend import TritonBackend

        return TritonBackend()
    libraries = {"cpu": "cpu_library", "cpu-amx": "amx_library", "cpu-narrowest": "narrowest_library"}
    return CpuBackend(request.getfixturevalue(libraries[request.param]))


@pytest.fixture
def launches(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Names and grids of the kernels that would be launched; nothing is launched."""
    from loraserve_kernels.triton_ops import launch

    found: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(launch, "launch_compiled", lambda kernel, grid, *_: found.append((kernel.fn.__name__, grid)))
    return found


@pytest.fixture
def replayed(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Turns a call into one that repeats its launches on the current content of its tensors.

    On a GPU, that is a CUDA graph of the call; in the interpreter, the call itself, checked to repeat its launches.
    """

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        if triton_device == "cpu":
            return checked_replay(call, monkeypatch)
        call()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    return capture


@pytest.fixture(scope="module")
def few_programs() -> Iterator[None]:
    """In the interpreter, two programs share the ranks of a tile, instead of up to 16 as on a GPU.

    With such small ranks most of the 16 would have no work, yet would take a third of the interpreter's time. The
    engine of `test_triton_engine.py` and the tests of the kernel itself launch all of them.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not HAS_GPU and importlib.util.find_spec("triton") is not None:
            lora_shrink = importlib.import_module("loraserve_kernels.triton_ops.lora_shrink")
            monkeypatch.setattr(lora_shrink, "MAX_RANK_PROGRAMS", 2)
        yield


@pytest.fixture(scope="module")
def unchecked_models(few_programs: None) -> Iterator[None]:
    """Engines start without checking their model; the check takes Triton's interpreter half a minute.

    The engine of `test_triton_engine.py` runs that check for a Llama.
    """
    from loraserve.models import self_check

    with pytest.MonkeyPatch.context() as monkeypatch:
        if not HAS_GPU:
            monkeypatch.setattr(self_check, "require_equal", lambda *_: None)
            monkeypatch.setattr(self_check, "is_equal", lambda *_: True)
            monkeypatch.setattr(self_check, "is_same", lambda *_: True)
        yield


@pytest.fixture
def kv_float8(monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The dtype of KV caches with one byte per element. Also makes the interpreter convert it as a GPU does."""
    if HAS_GPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU does not convert e4m3")
    if not HAS_GPU and importlib.util.find_spec("triton") is not None:
        convert_as_a_gpu(monkeypatch)
    return KV_FLOAT8


@pytest.fixture
def cpu(cpu_library: CpuLibrary) -> CpuBackend:
    return CpuBackend(cpu_library)


@pytest.fixture(params=["reference", "cpu"])
def host(request: pytest.FixtureRequest) -> SamplesOnHost:
    """Every implementation of sampling on the host."""
    return ReferenceSampling() if request.param == "reference" else request.getfixturevalue("cpu")


@pytest.fixture
def device(backend: Backend) -> str:
    """The device on which the tensors for `backend` must be."""
    return "cuda" if backend.name == "triton" and HAS_GPU else "cpu"


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param

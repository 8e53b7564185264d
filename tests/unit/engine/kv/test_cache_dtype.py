import pytest
import torch

from loraserve.engine.errors import EngineStartError
from loraserve.engine.kv.cache_dtype import choose_kv_cache_dtype
from tests.support.host_accelerator import HostAccelerator


@pytest.mark.parametrize("accelerator", [None, HostAccelerator(capability=(7, 5))])
def test_auto_chooses_the_models_dtype_on_any_device(accelerator: HostAccelerator | None) -> None:
    assert choose_kv_cache_dtype("auto", accelerator) is None


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_fp8_is_e4m3_on_gpus_that_convert_it(capability: tuple[int, int]) -> None:
    assert choose_kv_cache_dtype("fp8", HostAccelerator(capability=capability)) is torch.float8_e4m3fn


@pytest.mark.parametrize("capability", [(8, 6), (8, 0), (7, 5)])
def test_fp8_on_an_older_gpu_is_refused_with_its_capability_and_an_alternative(capability: tuple[int, int]) -> None:
    accelerator = HostAccelerator(torch.device("cuda:1"), capability=capability)
    found = rf"cuda:1 has {capability[0]}\.{capability[1]}: choose auto"
    with pytest.raises(
        EngineStartError, match=rf"--kv-cache-dtype fp8 .* compute capability 8\.9 or newer, but {found}"
    ):
        choose_kv_cache_dtype("fp8", accelerator)


def test_fp8_on_a_cpu_is_refused() -> None:
    with pytest.raises(EngineStartError, match=r"fp8 needs an NVIDIA GPU .* 8\.9 or newer, but this is a CPU: choose"):
        choose_kv_cache_dtype("fp8", None)


def test_an_unsupported_dtype_is_refused_by_name() -> None:
    with pytest.raises(EngineStartError, match="--kv-cache-dtype fp8_e5m2 is not supported: choose auto or fp8"):
        choose_kv_cache_dtype("fp8_e5m2", HostAccelerator())

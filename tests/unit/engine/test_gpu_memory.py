import pytest

from loraserve.engine.errors import EngineStartError
from loraserve.engine.gpu_memory import GpuMemory
from loraserve.engine.memory_plan import GPU_SHARES, plan_memory
from tests.support.host_accelerator import HostAccelerator


def test_what_is_left_is_our_share_less_weights_and_activations() -> None:
    accelerator = HostAccelerator(free=1000)
    memory = GpuMemory(accelerator, 0.9)
    assert memory.left_bytes() == 900
    accelerator.free = 600
    assert memory.left_bytes() == 500
    assert memory.left_bytes(activation_bytes=120) == 380


def test_a_model_that_takes_all_of_it_names_the_flags_to_change() -> None:
    accelerator = HostAccelerator(free=1000)
    memory = GpuMemory(accelerator, 0.5)
    accelerator.free = 520
    assert memory.left_bytes(19) == 1
    with pytest.raises(EngineStartError, match=r"take 500 bytes.* 500 are ours .*--max-num-batched-tokens, or raise"):
        memory.left_bytes(20)


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01])
def test_a_share_is_above_nothing_and_at_most_all(utilization: float) -> None:
    with pytest.raises(EngineStartError, match="--gpu-memory-utilization"):
        GpuMemory(HostAccelerator(), utilization)


def plan(kv_cache_bytes: int | None = None):
    return plan_memory(
        available_bytes=1_000_000,
        block_bytes=1000,
        block_size=16,
        model_max_len=2048,
        requested_max_len=None,
        kv_cache_bytes=kv_cache_bytes,
        adapter_bytes=None,
        enable_lora=True,
        shares=GPU_SHARES,
    )


def test_cache_and_adapters_share_all_that_is_left_on_a_gpu() -> None:
    chosen = plan()
    assert chosen.num_blocks == 850
    assert chosen.arena_size_bytes == 150_000


@pytest.mark.parametrize(("kv_cache_bytes", "advice"), [(900_000, "lower --kv-cache"), (1000, "raise --kv-cache")])
def test_too_little_of_a_gpu_names_its_flags_too(kv_cache_bytes: int, advice: str) -> None:
    with pytest.raises(EngineStartError, match=rf"{advice}.*--gpu-memory-utilization .*--max-num-batched-tokens"):
        plan(kv_cache_bytes)

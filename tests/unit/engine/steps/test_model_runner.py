from typing import cast

import pytest
import torch
from loraserve_kernels.kv_float8 import KV_FLOAT8
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loraserve.engine.steps.model_runner import ModelRunner
from loraserve.models.causal_model import CausalModel, KVSpec
from loraserve.models.context import StateSpec
from tests.support.memory_pages import can_populate, give_back, resident_pages


class Model:
    """The part of a `CausalModel` that a runner uses before its first step."""

    kv_specs = (KVSpec(2, 8), KVSpec(1, 16))
    state_specs = (StateSpec((2, 3), torch.float32), StateSpec((5,), torch.bfloat16))

    def __init__(self) -> None:
        self.caches: list[Tensor] = []
        self.states: list[Tensor] = []

    def bind(self, k_caches: list[Tensor], v_caches: list[Tensor], _table: object, states: list[Tensor]) -> None:
        self.caches = [*k_caches, *v_caches]
        self.states = states


def test_a_token_takes_keys_and_values_or_latents_which_are_both() -> None:
    assert KVSpec(8, 64).elements_per_token == 2 * 8 * 64
    assert KVSpec(1, 576, num_caches=1).elements_per_token == 576


def test_keys_and_values_of_latents_are_one_cache() -> None:
    model = Model()
    model.kv_specs = (KVSpec(2, 8), KVSpec(1, 16, num_caches=1))
    runner = ModelRunner(cast(CausalModel, model), 5, 4, None, torch.device("cpu"), torch.float32)
    of_heads, of_latents = zip(model.caches[:2], model.caches[2:], strict=True)
    assert of_heads[0] is not of_heads[1]
    assert of_latents[0] is of_latents[1]
    assert len(runner._caches) == 3


class Launches(TorchDispatchMode):
    """Counts operations that write or allocate."""

    num_found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        self.num_found += not func.is_view
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param([], id="none"),
        pytest.param([(0, 3)], id="one"),
        pytest.param([(0, 3), (1, 4)], id="two"),
        pytest.param([(0, 3), (3, 4), (4, 1)], id="of copies"),
        pytest.param([(0, 3), (1, 3)], id="over a copy of one that was preempted"),
        pytest.param([(0, 3), (4, 0), (2, 4)], id="over what was copied"),
        pytest.param([(0, block) for block in range(1, 5)], id="of one block"),
    ],
)
def test_block_copies_give_the_same_result_as_if_made_one_after_the_other(copies: list[tuple[int, int]]) -> None:
    model = Model()
    runner = ModelRunner(cast(CausalModel, model), 5, 4, None, torch.device("cpu"), torch.float32)
    expected = []
    for cache in model.caches:
        expected.append(cache.normal_().clone())
        for source, destination in copies:
            expected[-1][destination] = expected[-1][source]
    with Launches() as launches:
        runner.copy_blocks(copies)
    assert all(map(torch.equal, model.caches, expected))
    assert launches.num_found <= 2 * len(model.caches) + 4


@pytest.mark.skipif(not can_populate(), reason="the system cannot touch pages by request")
def test_touch_ahead_touches_the_memory_of_every_cache() -> None:
    model = Model()
    runner = ModelRunner(cast(CausalModel, model), 4096, 16, None, torch.device("cpu"), torch.float32)
    for cache in model.caches:
        give_back(cache)
    assert not any(all(resident_pages(cache)) for cache in model.caches)
    while runner.touch_ahead(0, 0):
        pass
    assert all(all(resident_pages(cache)) for cache in model.caches)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, KV_FLOAT8], ids=lambda d: str(d)[6:])
def test_blocks_are_copied_and_wiped_in_every_cache(kv_dtype: torch.dtype) -> None:
    model = Model()
    runner = ModelRunner(cast(CausalModel, model), 5, 4, None, torch.device("cpu"), kv_dtype)
    assert [tuple(cache.shape) for cache in model.caches] == [(5, 2, 4, 8), (5, 1, 4, 16)] * 2
    before = [torch.randn(cache.shape).to(kv_dtype) for cache in model.caches]
    for cache, values in zip(model.caches, before, strict=True):
        values[2:4] = torch.full(values[2:4].shape, float("nan")).to(kv_dtype)
        cache.copy_(values)
    runner.copy_blocks([(0, 3), (3, 4)])
    runner.zero_blocks([2, 1])
    for cache, values in zip(model.caches, before, strict=True):
        assert cache.dtype is kv_dtype
        found, expected = cache.float(), values.float()
        assert torch.equal(found[[0, 3, 4]], expected[[0, 0, 0]])
        assert torch.equal(found[1:3], torch.zeros_like(found[1:3]))


def test_states_are_copied_one_after_another_and_only_those() -> None:
    model = Model()
    runner = ModelRunner(cast(CausalModel, model), 2, 4, None, torch.device("cpu"), torch.float32, num_state_slots=4)
    for state in model.states:
        for slot in range(4):
            state[slot] = slot
    runner.copy_states([(0, 1), (1, 3)])
    for state in model.states:
        assert [state[slot].unique().tolist() for slot in range(4)] == [[0], [0], [2], [0]]

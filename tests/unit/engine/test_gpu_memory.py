from collections.abc import Callable
from typing import cast

import pytest
import torch
from loraserve_kernels.attention_work import APPEND_ROWS, append_capacity, make_attention_work
from loraserve_kernels.step_batch import StepBatch

from loraserve.engine.config import EngineConfig
from loraserve.engine.errors import EngineStartError
from loraserve.engine.gpu_memory import GpuMemory, _sampling_bytes, activation_bytes
from loraserve.engine.memory_plan import GPU_SHARES, plan_memory
from loraserve.engine.sampling.device_logprobs import LOGPROBS_BYTES, ROWS_PER_CHUNK
from loraserve.engine.sampling.token_counts import TokenCounts
from loraserve.models.causal_model import CausalModel
from tests.support.host_accelerator import HostAccelerator


def test_memory_left_is_our_share_minus_weights_and_activations() -> None:
    accelerator = HostAccelerator(free=1000)
    memory = GpuMemory(accelerator, 0.9)
    assert memory.left_bytes() == 900
    accelerator.free = 600
    assert memory.left_bytes() == 500
    assert memory.left_bytes(activation_bytes=120) == 380


def test_a_model_that_takes_the_whole_share_is_refused_with_the_flags_to_change() -> None:
    accelerator = HostAccelerator(free=1000)
    memory = GpuMemory(accelerator, 0.5)
    accelerator.free = 520
    assert memory.left_bytes(19) == 1
    with pytest.raises(
        EngineStartError, match=r"take 500 bytes.* share is 500 bytes .*--max-num-batched-tokens, or raise"
    ):
        memory.left_bytes(20)


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01])
def test_a_utilization_must_be_above_0_and_at_most_1(utilization: float) -> None:
    with pytest.raises(EngineStartError, match="--gpu-memory-utilization"):
        GpuMemory(HostAccelerator(), utilization)


def plan(kv_cache_bytes: int | None = None):
    return plan_memory(
        available_bytes=1_000_000,
        block_bytes=1000,
        block_size=16,
        model_max_len=2048,
        requested_max_len=None,
        max_num_seqs=128,
        kv_cache_bytes=kv_cache_bytes,
        adapter_bytes=None,
        enable_lora=True,
        shares=GPU_SHARES,
    )


def test_cache_and_adapters_share_all_memory_left_on_a_gpu() -> None:
    chosen = plan()
    assert chosen.num_blocks == 850
    assert chosen.arena_size_bytes == 150_000


@pytest.mark.parametrize(("kv_cache_bytes", "advice"), [(900_000, "lower --kv-cache"), (1000, "raise --kv-cache")])
def test_bad_cache_sizes_on_a_gpu_are_refused_with_its_flags_too(kv_cache_bytes: int, advice: str) -> None:
    with pytest.raises(EngineStartError, match=rf"{advice}.*--gpu-memory-utilization .*--max-num-batched-tokens"):
        plan(kv_cache_bytes)


@pytest.mark.parametrize("num_rows", [1, 200])
def test_sampling_memory_has_room_for_counts_and_edited_logits_of_every_sequence(num_rows: int) -> None:
    counts = TokenCounts(torch.device("cpu"), 1000, num_rows).tensor
    edited = torch.zeros(num_rows, 1000)
    assert _sampling_bytes(num_rows, 1000) > counts.nbytes + edited.nbytes


class Model:
    """Records its batches."""

    dtype = torch.bfloat16
    logits_size = 100
    kv_specs = ()
    state_specs = ()

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def bind(self, *_: object) -> None:
        pass

    def forward(self, batch: StepBatch, _: object) -> torch.Tensor:
        self.batches.append(batch)
        return torch.empty(0)


def measured(max_num_batched_tokens: int, peak: int = 1_000_000, max_num_seqs: int = 4) -> tuple[Model, int]:
    model = Model()
    config = EngineConfig("model", max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    accelerator = HostAccelerator(peak=peak)
    found = activation_bytes(accelerator, cast(CausalModel, model), None, config, torch.bfloat16, lambda *_: None)
    return model, found


def test_activation_memory_includes_the_prompt_logits_of_every_row() -> None:
    assert measured(40)[1] - measured(4)[1] == (40 - 4) * 100 * 2


def test_scoring_prompt_rows_may_take_more_memory_than_the_step_before_it() -> None:
    """The two never take memory at the same time, except for the logits of sampled rows; graphs do not score."""
    step = 1000
    scored = (ROWS_PER_CHUNK * LOGPROBS_BYTES + 4 * Model.dtype.itemsize) * Model.logits_size
    assert measured(ROWS_PER_CHUNK, step)[1] - measured(ROWS_PER_CHUNK, scored)[1] == step - scored
    assert measured(ROWS_PER_CHUNK, scored + 1)[1] - measured(ROWS_PER_CHUNK, scored)[1] == 2


def test_kernels_are_compiled_for_one_row_and_for_prompts_with_all_or_some_rows_sampled() -> None:
    model, _ = measured(40)
    assert {(1, 1), (17, 17), (4, 40)} <= {(len(batch.sampled_rows), len(batch.token_ids)) for batch in model.batches}


@pytest.mark.parametrize("max_num_seqs", [64, 128, 256])
def test_a_measured_step_has_nearly_the_longest_possible_list_of_append_splits(max_num_seqs: int) -> None:
    """Each entry of the list keeps partial results."""
    num_rows, num_splits = 2048, 66
    model, _ = measured(num_rows, max_num_seqs=max_num_seqs)
    largest = model.batches[-1]
    assert len(largest.token_ids) == int(largest.num_rows.sum()) == num_rows
    work = make_attention_work(largest.context_lens, largest.num_rows, num_splits)
    few = min(num_rows, max_num_seqs * APPEND_ROWS)
    longest = append_capacity(few, max_num_seqs, 8192, num_splits)
    assert longest - 2 <= len(work.append_splits) <= longest


@pytest.mark.parametrize(
    ("num_rows", "max_num_seqs", "rows"),
    [
        (2048, 1, [2048]),
        (2048, 3, [16, 16, 2016]),
        (40, 4, [10, 10, 10, 10]),
        (10, 8, [2, 2, 2, 2, 2]),
        (3, 8, [2, 1]),
        (1, 4, [1]),
    ],
)
def test_all_rows_are_divided_among_at_most_max_num_seqs_sequences(
    num_rows: int, max_num_seqs: int, rows: list[int]
) -> None:
    model, _ = measured(num_rows, max_num_seqs=max_num_seqs)
    largest = model.batches[-1]
    assert largest.num_rows.tolist() == rows
    assert largest.row_start.tolist() == [sum(rows[:index]) for index in range(len(rows))]
    assert largest.block_table.shape[0] == len(rows)
    assert set(largest.context_lens.tolist()) == {num_rows}


class Measuring(HostAccelerator):
    """The peak is a million bytes for each sequence of the model's last batch."""

    model = Model()

    def peak_bytes(self, call: Callable[[], object]) -> int:
        call()
        return 1_000_000 * len(self.model.batches[-1].num_rows)


def test_the_larger_peak_counts_of_a_prompt_alone_and_one_beside_sequences_of_few_rows() -> None:
    accelerator = Measuring()
    model = cast(CausalModel, accelerator.model)
    config = EngineConfig("model", max_num_seqs=4, max_num_batched_tokens=40)
    found = activation_bytes(accelerator, model, None, config, torch.bfloat16, lambda *_: None)
    assert [batch.num_rows.tolist() for batch in accelerator.model.batches[-2:]] == [[40], [10] * 4]
    assert found == measured(40, 4_000_000)[1]

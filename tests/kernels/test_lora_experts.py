import dataclasses
import random

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.lora_add import LoraInputs, make_lora_inputs, matrix
from loraserve_kernels.lora_experts import lora_add_experts, pair_up
from loraserve_kernels.lora_tiles import tiles_of
from loraserve_kernels.step_batch import Segments
from torch import Tensor

BASE = -1
NUM_EXPERTS, TOP_K = 5, 2
ROWS, SLOTS, RANKS = [3, 1, 0, 4, 2], [BASE, 0, 1, 2, 3], [3, 7, 8, 0]
"""Tokens of each segment, its adapter slot, and each adapter's rank; the last adapter has none for experts."""


def make_inputs(dtype: torch.dtype, device: str, in_features: int = 24, out_features: int = 40) -> LoraInputs:
    """Inputs for a group of one member; each adapter's matrices contain those of all experts."""
    ranks = [(rank * NUM_EXPERTS,) for rank in RANKS]
    inputs = make_lora_inputs(ROWS, SLOTS, ranks, in_features, (out_features,), dtype, device)
    inputs.table.lora_rank[:, inputs.group.member_start] //= NUM_EXPERTS
    return inputs


def pairs_of(num_tokens: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token and expert of each pair, ordered by expert; some experts have no tokens."""
    rng = random.Random(seed)
    experts = torch.tensor([rng.sample(range(NUM_EXPERTS - 1), TOP_K) for _ in range(num_tokens)], device=device)
    expert, order = experts.flatten().sort(stable=True)
    return order // TOP_K, expert


def expected_y(inputs: LoraInputs, y: Tensor, token: Tensor, expert: Tensor) -> Tensor:
    """In float64, pair by pair."""
    table, group = inputs.table, inputs.group
    slot_of_token = [slot for slot, rows in zip(SLOTS, ROWS, strict=True) for _ in range(rows)]
    expected = y.double()
    for row, (i, e) in enumerate(zip(token.tolist(), expert.tolist(), strict=True)):
        slot = slot_of_token[i]
        rank = 0 if slot == BASE else int(table.lora_rank[slot, group.member_start])
        if rank:
            first, features = e * rank, (group.in_features, group.out_features[0])
            offsets = int(table.offset_a[slot, group.group_index]), int(table.offset_b[slot, group.member_start])
            a, b = (
                matrix(table, offset + first * n, rank, n).double() for offset, n in zip(offsets, features, strict=True)
            )
            scaling = float(table.scaling[slot, group.member_start])
            expected[row] += scaling * (inputs.x[i].double() @ a.T) @ b
    return expected


@pytest.mark.parametrize("with_tiles", [False, True])
def test_adds_the_product_of_each_pairs_adapter_and_expert(
    backend: Backend, device: str, dtype: torch.dtype, assert_close, with_tiles: bool
) -> None:
    inputs = make_inputs(dtype, device)
    segments, num_tokens = inputs.segments, sum(ROWS)
    if with_tiles:
        segments = dataclasses.replace(segments, tiles=tiles_of(segments, num_tokens))
    token, expert = pairs_of(num_tokens, device)
    y = torch.randn(len(token), 40, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    expected = expected_y(inputs, y, token, expert)
    pairs = pair_up(segments, num_tokens, token, expert)
    lora_add_experts(backend, y, inputs.x[token], inputs.group, inputs.table, pairs)
    assert_close(y, expected)


def test_repeated_calls_do_not_grow_a_backends_cache_of_groups(cpu_library: CpuLibrary) -> None:
    """Backends keep data for each group, and each call makes a new table."""
    backend, inputs, num_tokens = CpuBackend(cpu_library), make_inputs(torch.float32, "cpu"), sum(ROWS)
    token, expert = pairs_of(num_tokens, "cpu")
    for _ in range(3):
        pairs = pair_up(inputs.segments, num_tokens, token, expert)
        lora_add_experts(backend, torch.zeros(len(token), 40), inputs.x[token], inputs.group, inputs.table, pairs)
    assert len(backend._bound_groups) == 1


def test_launches_depend_on_shapes_alone(triton_device: str, replayed, assert_close) -> None:
    """The tensors have more tokens than the segments, as in a padded batch."""
    from loraserve_kernels.triton_backend import TritonBackend

    backend, inputs, num_padding = TritonBackend(), make_inputs(torch.float32, triton_device), 3
    num_tokens = sum(ROWS)
    tiles = tiles_of(inputs.segments, num_tokens + num_padding)
    segments = Segments(torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), True, tiles)
    token, expert = pairs_of(num_tokens + num_padding, triton_device)
    x = torch.cat([inputs.x, inputs.x[:num_padding]])
    y = torch.zeros(len(token), 40, device=triton_device)

    def call() -> None:
        pairs = pair_up(segments, num_tokens + num_padding, token, expert)
        lora_add_experts(backend, y, x[token], inputs.group, inputs.table, pairs)

    replay = replayed(call)
    for seed in (1, 2):
        new_token, new_expert = pairs_of(num_tokens + num_padding, triton_device, seed)
        token.copy_(new_token)
        expert.copy_(new_expert)
        y.zero_()
        replay()
        is_token = token < num_tokens
        expected = expected_y(inputs, torch.zeros_like(y[is_token]), token[is_token], expert[is_token])
        assert_close(y[is_token], expected)
        assert not y[~is_token].any()

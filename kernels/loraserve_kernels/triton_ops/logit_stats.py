"""First sampling stage, over the vocabulary: the best token of each part of a row, and maxima and masses of lanes."""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.launch_sizes import ceil_div
from loraserve_kernels.sampling import LANE_LENGTH, LEAST_TEMPERATURE, DrawParams
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs
from loraserve_kernels.triton_ops.logit_rows import columns_if, load_logits

_LANES = 128
"""Lanes per program: 8192 logits, so that one row of 128256 has 16 programs and 64 rows fill the GPU several times."""
PART = LANE_LENGTH * _LANES
"""Tokens per program."""

_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _not_nan(logits):
    """float32 with inf instead of NaN, so that a row's maximum shows whether the row is finite."""
    logits = logits.to(tl.float32)
    return tl.where(logits < float("inf"), logits, float("inf"))


@triton.jit
def _stats_kernel(
    logits_ptr,
    is_edited_ptr,
    best_value_ptr,
    best_id_ptr,
    lane_max_ptr,
    vocab_size,
    row_stride,
    num_lanes,
    ONLY_EDITED: tl.constexpr,
    IN_LANES: tl.constexpr,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if ONLY_EDITED:
        is_edited = tl.load(is_edited_ptr + row) != 0
        if not is_edited:
            return
    logits_ptr += row * row_stride
    if IN_LANES:
        lane = part * LANES + tl.arange(0, LANES)
        columns = tl.arange(0, LENGTH)[:, None] * num_lanes + lane[None, :]
        mask = (lane < num_lanes)[None, :] & (columns < vocab_size)
        logits = _not_nan(tl.load(logits_ptr + columns, mask=mask, other=-float("inf")))
        maxima = tl.max(logits, axis=0)
        tl.store(lane_max_ptr + row * num_lanes + lane, maxima, mask=lane < num_lanes)
        best = tl.max(maxima, axis=0)
        best_id = tl.min(tl.min(tl.where((logits == best) & mask, columns, _NO_TOKEN), axis=0), axis=0)
    else:
        columns = part * (LENGTH * LANES) + tl.arange(0, LENGTH * LANES)
        mask = columns < vocab_size
        logits = _not_nan(tl.load(logits_ptr + columns, mask=mask, other=-float("inf")))
        best = tl.max(logits, axis=0)
        best_id = tl.min(tl.where((logits == best) & mask, columns, _NO_TOKEN), axis=0)
    tl.store(best_value_ptr + row * tl.num_programs(1) + part, best)
    tl.store(best_id_ptr + row * tl.num_programs(1) + part, best_id)


@triton.jit
def _lane_mass_kernel(
    raw_ptr,
    edited_ptr,
    is_edited_ptr,
    peak_ptr,
    temperature_ptr,
    top_k_ptr,
    log_min_p_ptr,
    lane_mass_ptr,
    vocab_size,
    row_stride,
    num_lanes,
    least_temperature,
    HAS_EDITS: tl.constexpr,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    peak = tl.load(peak_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if (temperature < least_temperature) | (peak == float("inf")) | has_top_k:
        return
    edited_end = tl.full([], 0, tl.int32)
    if HAS_EDITS:
        edited_end = columns_if(is_edited_ptr + row, vocab_size)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    columns = tl.arange(0, LENGTH)[:, None] * num_lanes + lane[None, :]
    mask = (lane < num_lanes)[None, :] & (columns < vocab_size)
    logits = load_logits(
        raw_ptr + row * row_stride, edited_ptr + row * vocab_size, edited_end, columns, mask, HAS_EDITS
    )
    floor = (peak.to(tl.float64) + temperature * tl.load(log_min_p_ptr + row)).to(tl.float32)
    weights = tl.exp((logits - peak) * (1.0 / temperature).to(tl.float32))
    masses = tl.sum(tl.where(mask & (logits >= floor), weights, 0.0), axis=0)
    tl.store(lane_mass_ptr + row * num_lanes + lane, masses, mask=lane < num_lanes)


def logit_stats(
    logits: Tensor, vocab_size: int, lane_max: Tensor | None, only_edited: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(largest logit float32, its lowest id int32), both [R, parts of a row]; a NaN counts as inf.

    lane_max: float32 [R, L], filled if given. only_edited: int8 [R], skips rows that are 0 in it.
    """
    num_rows = logits.shape[0]
    num_parts = ceil_div(vocab_size, PART)
    best_value = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    launch(
        _stats_kernel,
        (num_rows, num_parts),
        logits,
        best_id if only_edited is None else only_edited,
        best_value,
        best_id,
        best_value if lane_max is None else lane_max,
        vocab_size,
        logits.stride(0),
        ceil_div(vocab_size, LANE_LENGTH),
        ONLY_EDITED=only_edited is not None,
        IN_LANES=lane_max is not None,
        LENGTH=LANE_LENGTH,
        LANES=_LANES,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return best_value, best_id


def lane_masses(
    logits: Tensor, edited: Tensor, is_edited: Tensor | None, vocab_size: int, peaks: Tensor, draws: DrawParams
) -> Tensor:
    """float32 [R, L]: the sum of exp((logit - peak) / temperature) over a lane's logits that min_p leaves.

    Undefined for rows that are greedy, have a top_k, or have a peak of inf.
    """
    num_rows, num_lanes = logits.shape[0], ceil_div(vocab_size, LANE_LENGTH)
    lane_mass = torch.empty((num_rows, num_lanes), dtype=torch.float32, device=logits.device)
    launch(
        _lane_mass_kernel,
        (num_rows, ceil_div(num_lanes, _LANES)),
        logits,
        edited,
        peaks if is_edited is None else is_edited,
        peaks,
        draws.temperature,
        draws.top_k,
        draws.log_min_p,
        lane_mass,
        vocab_size,
        logits.stride(0),
        num_lanes,
        LEAST_TEMPERATURE,
        HAS_EDITS=is_edited is not None,
        LENGTH=LANE_LENGTH,
        LANES=_LANES,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return lane_mass

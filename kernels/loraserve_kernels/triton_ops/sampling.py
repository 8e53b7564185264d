"""Choose tokens on the GPU, without the host: two launches for greedy rows, four with draws, three more with edits.

A row's result depends only on its own logits and parameters: how a row is split depends on the vocabulary's size alone.

Results equal the CPU sampler's except for float32 rounding: lane masses are summed in another order, and weights in
them and in the search for large nuclei use the GPU's exponentials. This matters only if a draw falls within about 1e-6
of the boundary between two tokens.
"""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.launch_sizes import ceil_div, power_of_2
from loraserve_kernels.logit_edits import IS_ALLOWED, LogitEdits
from loraserve_kernels.sampling import LANE_LENGTH, LEAST_TEMPERATURE, DrawParams
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs
from loraserve_kernels.triton_ops.logit_edits import edit_logits
from loraserve_kernels.triton_ops.logit_stats import lane_masses, logit_stats
from loraserve_kernels.triton_ops.token_choice import MAX_CANDIDATES, MIN_LANES, choose_kernel

_LISTED = 128
KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 0, torch.float32: 0}
"""Low bits of a float32 that, after widening from this dtype, are equal in all numbers of one sign."""

_IS_ALLOWED = tl.constexpr(IS_ALLOWED)
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _best_of_parts(value_ptr, id_ptr, row, num_parts, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    values = tl.load(value_ptr + row * num_parts + parts, mask=parts < num_parts, other=-float("inf"))
    token_ids = tl.load(id_ptr + row * num_parts + parts, mask=parts < num_parts, other=_NO_TOKEN)
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, token_ids, _NO_TOKEN), axis=0)


@triton.jit
def _best_allowed(logits_ptr, token_ids_ptr, marks_ptr, first, end, vocab_size, BLOCK: tl.constexpr):
    """The lowest id of the listed, allowed tokens with the largest logit; `_NO_TOKEN` if there is none."""
    best = tl.full([], -float("inf"), tl.float32)
    best_id = tl.full([], _NO_TOKEN, tl.int32)
    for start in range(first, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        token_ids = tl.load(token_ids_ptr + places, mask=places < end, other=-1)
        marks = tl.load(marks_ptr + places, mask=places < end, other=0)
        is_allowed = (token_ids >= 0) & (token_ids < vocab_size) & (marks & _IS_ALLOWED != 0)
        logits = tl.load(logits_ptr + token_ids, mask=is_allowed, other=-float("inf")).to(tl.float32)
        found = tl.max(logits, axis=0)
        found_id = tl.min(tl.where(is_allowed & (logits == found), token_ids, _NO_TOKEN), axis=0)
        is_better = (found > best) | ((found == best) & (found_id < best_id))
        best = tl.where(is_better, found, best)
        best_id = tl.where(is_better, found_id, best_id)
    return best_id


@triton.jit
def _combine_kernel(
    logits_ptr,
    raw_value_ptr,
    raw_id_ptr,
    edited_value_ptr,
    edited_id_ptr,
    is_edited_ptr,
    is_blank_ptr,
    start_ptr,
    listed_ids_ptr,
    marks_ptr,
    token_ids_ptr,
    is_finite_ptr,
    peak_ptr,
    vocab_size,
    row_stride,
    num_parts,
    HAS_EDITS: tl.constexpr,
    HAS_DRAWS: tl.constexpr,
    PARTS: tl.constexpr,
    LISTED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write greedy tokens and which rows are finite; with draws also rows' peaks, inf if nothing can be drawn."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    peak, token_id = _best_of_parts(raw_value_ptr, raw_id_ptr, row, num_parts, PARTS)
    is_finite = (peak > -float("inf")) & (peak < float("inf"))
    if HAS_EDITS:
        is_replaced = is_finite & (tl.load(is_edited_ptr + row) != 0)
        if is_replaced:
            raw_id = token_id
            peak, token_id = _best_of_parts(edited_value_ptr, edited_id_ptr, row, num_parts, PARTS)
            is_finite = peak < float("inf")
            if peak == -float("inf"):
                token_id = raw_id
                if tl.load(is_blank_ptr + row) != 0:
                    first, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
                    token_id = _best_allowed(
                        logits_ptr + row * row_stride, listed_ids_ptr, marks_ptr, first, end, vocab_size, LISTED
                    )
                    is_finite = token_id != _NO_TOKEN
    tl.store(token_ids_ptr + row, tl.where(is_finite, token_id, 0).to(tl.int64))
    tl.store(is_finite_ptr + row, is_finite.to(tl.uint8))
    if HAS_DRAWS:
        tl.store(peak_ptr + row, tl.where(is_finite & (peak > -float("inf")), peak, float("inf")))


def sample(
    logits: Tensor, vocab_size: int, draws: DrawParams | None, edits: LogitEdits | None
) -> tuple[Tensor, Tensor]:
    """(token ids int64 [R], is finite bool [R]), as `sample_reference`; the logits are not written to.

    draws: None = all rows are greedy. edits: None = no edits. Launches depend on whether these are None, so a captured
    graph serves only batches that agree in that. Scratch memory with edits: 4 bytes per logit.
    """
    num_rows, device = logits.shape[0], logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return token_ids, is_finite
    num_lanes = ceil_div(vocab_size, LANE_LENGTH)
    lane_max = None if draws is None else torch.empty((num_rows, num_lanes), dtype=torch.float32, device=device)
    peaks = torch.empty(num_rows, dtype=torch.float32, device=device)
    raw_value, raw_id = logit_stats(logits, vocab_size, lane_max)
    edited, edited_value, edited_id = logits, raw_value, raw_id
    if edits is not None:
        edited = edit_logits(logits, vocab_size, edits)
        edited_value, edited_id = logit_stats(edited, vocab_size, lane_max, edits.is_edited)
    num_parts = raw_value.shape[1]
    launch(
        _combine_kernel,
        (num_rows,),
        logits,
        raw_value,
        raw_id,
        edited_value,
        edited_id,
        token_ids if edits is None else edits.is_edited,
        token_ids if edits is None else edits.is_blank,
        token_ids if edits is None else edits.start,
        token_ids if edits is None else edits.token_ids,
        token_ids if edits is None else edits.marks,
        token_ids,
        is_finite.view(torch.uint8),
        peaks,
        vocab_size,
        logits.stride(0),
        num_parts,
        HAS_EDITS=edits is not None,
        HAS_DRAWS=draws is not None,
        PARTS=power_of_2(num_parts),
        LISTED=_LISTED,
        num_warps=1,
        enable_fp_fusion=True,
    )
    if draws is not None and lane_max is not None:
        _draw(logits, edited, vocab_size, draws, edits, lane_max, peaks, token_ids)
    return token_ids, is_finite


def _draw(
    logits: Tensor,
    edited: Tensor,
    vocab_size: int,
    draws: DrawParams,
    edits: LogitEdits | None,
    lane_max: Tensor,
    peaks: Tensor,
    token_ids: Tensor,
) -> None:
    num_rows, num_lanes = lane_max.shape
    is_edited = None if edits is None else edits.is_edited
    lane_mass = lane_masses(logits, edited, is_edited, vocab_size, peaks, draws)
    launch(
        choose_kernel,
        (num_rows,),
        logits,
        edited,
        peaks if is_edited is None else is_edited,
        peaks,
        lane_max,
        lane_mass,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.log_min_p,
        draws.seed,
        draws.position,
        torch.empty((num_rows, MAX_CANDIDATES), dtype=torch.int32, device=logits.device),
        torch.empty((num_rows, MAX_CANDIDATES), dtype=torch.int64, device=logits.device),
        token_ids,
        vocab_size,
        logits.stride(0),
        num_lanes,
        LEAST_TEMPERATURE,
        HAS_EDITS=edits is not None,
        KEY_SHIFT=KEY_SHIFTS[logits.dtype],
        LENGTH=LANE_LENGTH,
        LANES=max(MIN_LANES, power_of_2(num_lanes)),
        num_warps=8,
        enable_fp_fusion=True,
    )

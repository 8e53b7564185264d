"""Edit rows of logits into a float32 copy: first all tokens of a row, then again those that the row lists."""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.launch_sizes import ceil_div
from loraserve_kernels.logit_edits import IN_PROMPT, IS_ALLOWED, IS_BANNED, LogitEdits
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs
from loraserve_kernels.triton_ops.logit_rows import columns_if

_BLOCK = 2048
_LISTED = 128
"""Listed tokens per iteration; a request rarely lists more."""

_IN_PROMPT = tl.constexpr(IN_PROMPT)
_IS_ALLOWED = tl.constexpr(IS_ALLOWED)
_IS_BANNED = tl.constexpr(IS_BANNED)


@triton.jit
def _penalised(logits, counts, repetition, frequency, presence):
    num_outputs = counts & (_IN_PROMPT - 1)
    subtrahend = (frequency * num_outputs.to(tl.float32)).to(tl.float64) + tl.where(num_outputs > 0, presence, 0.0)
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition + tl.zeros_like(logits)), logits * repetition)
    return tl.where(counts > 0, repeated - subtrahend.to(tl.float32), logits)


@triton.jit
def _edit_all_kernel(
    logits_ptr,
    edited_ptr,
    is_edited_ptr,
    is_blank_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    count_row_ptr,
    token_counts_ptr,
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_edited_ptr + row) == 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    is_kept = mask & (columns >= columns_if(is_blank_ptr + row, vocab_size))
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=is_kept, other=-float("inf")).to(tl.float32)
    count_row = tl.load(count_row_ptr + row).to(tl.int64)
    if count_row >= 0:
        counts = tl.load(token_counts_ptr + count_row * vocab_size + columns, mask=mask, other=0)
        repetition, frequency = tl.load(repetition_ptr + row), tl.load(frequency_ptr + row)
        logits = _penalised(logits, counts, repetition, frequency, tl.load(presence_ptr + row))
    tl.store(edited_ptr + row * vocab_size + columns, logits, mask=mask)


@triton.jit
def _edit_listed_kernel(
    logits_ptr,
    edited_ptr,
    is_blank_ptr,
    start_ptr,
    token_ids_ptr,
    biases_ptr,
    marks_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    count_row_ptr,
    token_counts_ptr,
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    blank_end = columns_if(is_blank_ptr + row, vocab_size)
    count_row = tl.load(count_row_ptr + row).to(tl.int64)
    end = tl.load(start_ptr + row + 1)
    for first in range(tl.load(start_ptr + row), end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        token_ids = tl.load(token_ids_ptr + places, mask=places < end, other=-1)
        marks = tl.load(marks_ptr + places, mask=places < end, other=0)
        mask = (token_ids >= 0) & (token_ids < vocab_size)
        is_kept = mask & ((marks & _IS_ALLOWED != 0) | (token_ids >= blank_end))
        logits = tl.load(logits_ptr + row * row_stride + token_ids, mask=is_kept, other=-float("inf")).to(tl.float32)
        logits += tl.load(biases_ptr + places, mask=places < end, other=0.0)
        logits = tl.where(marks & _IS_BANNED != 0, -float("inf"), logits)
        if count_row >= 0:
            counts = tl.load(token_counts_ptr + count_row * vocab_size + token_ids, mask=mask, other=0)
            repetition, frequency = tl.load(repetition_ptr + row), tl.load(frequency_ptr + row)
            logits = _penalised(logits, counts, repetition, frequency, tl.load(presence_ptr + row))
        tl.store(edited_ptr + row * vocab_size + token_ids, logits, mask=mask)


@triton.jit
def _count_tokens_kernel(
    count_row_ptr, token_ids_ptr, is_finite_ptr, token_counts_ptr, vocab_size, IS_DEPENDENT: tl.constexpr
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0)
    count_row = tl.load(count_row_ptr + row).to(tl.int64)
    if (count_row >= 0) & (tl.load(is_finite_ptr + row) != 0):
        token_ptr = token_counts_ptr + count_row * vocab_size + tl.load(token_ids_ptr + row)
        tl.store(token_ptr, tl.load(token_ptr) + 1)


def edit_logits(logits: Tensor, vocab_size: int, edits: LogitEdits) -> Tensor:
    """float32 [R, V]; rows without edits are left undefined."""
    num_rows = logits.shape[0]
    edited = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    launch(
        _edit_all_kernel,
        (num_rows, ceil_div(vocab_size, _BLOCK)),
        logits,
        edited,
        edits.is_edited,
        edits.is_blank,
        edits.repetition,
        edits.frequency,
        edits.presence,
        edits.count_row,
        edits.token_counts,
        vocab_size,
        logits.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # penalized logits equal the CPU's, bit for bit
    )
    launch(
        _edit_listed_kernel,
        (num_rows,),
        logits,
        edited,
        edits.is_blank,
        edits.start,
        edits.token_ids,
        edits.biases,
        edits.marks,
        edits.repetition,
        edits.frequency,
        edits.presence,
        edits.count_row,
        edits.token_counts,
        vocab_size,
        logits.stride(0),
        BLOCK=_LISTED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return edited


def count_tokens(edits: LogitEdits, token_ids: Tensor, is_finite: Tensor) -> None:
    """As `count_tokens_reference`."""
    if token_ids.shape[0]:
        launch(
            _count_tokens_kernel,
            (token_ids.shape[0],),
            edits.count_row,
            token_ids,
            is_finite.view(torch.uint8),
            edits.token_counts,
            edits.token_counts.shape[1],
            num_warps=1,
            enable_fp_fusion=True,
        )

"""Shared by the sampling kernels: loading a row that may be edited, and integers ordered like logits."""

import triton
import triton.language as tl


@triton.jit
def columns_if(flag_ptr, vocab_size):
    """vocab_size if the int8 flag is set, else 0: an end to compare columns with, instead of a scalar in a mask.

    NOTE: Triton's interpreter rejects a scalar comparison combined with a mask.
    """
    return tl.where(tl.load(flag_ptr) != 0, vocab_size, 0)


@triton.jit
def load_logits(raw_ptr, edited_ptr, edited_end, columns, mask, HAS_EDITS: tl.constexpr):
    """float32, -inf where masked. raw_ptr, edited_ptr: first logits of the row; below edited_end, reads the latter."""
    if HAS_EDITS:
        raw = tl.load(raw_ptr + columns, mask=mask & (columns >= edited_end), other=-float("inf")).to(tl.float32)
        edited = tl.load(edited_ptr + columns, mask=mask & (columns < edited_end), other=-float("inf"))
        return tl.where(columns < edited_end, edited, raw)
    else:
        return tl.load(raw_ptr + columns, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def order_key(logits):
    """int32 keys in the order of float32 logits without NaN; -0 and 0 have the same key."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of_key(key):
    """The inverse of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def next_float64(number, step: tl.constexpr):
    """The float64 after (step 1) or before (step -1) a non-negative number."""
    return (number.to(tl.int64, bitcast=True) + step).to(tl.float64, bitcast=True)

"""What the sampling kernels share: reading a row that is edited or not, and integers ordered as logits are."""

import triton
import triton.language as tl


@triton.jit
def columns_if(flag_ptr, vocab_size):
    """All columns, as their end, if the int8 flag is set, else 0: to compare columns with, as scalars make no masks.

    NOTE: a comparison of a scalar joined to a mask is refused by Triton's interpreter.
    """
    return tl.where(tl.load(flag_ptr) != 0, vocab_size, 0)


@triton.jit
def load_logits(raw_ptr, edited_ptr, edited_end, columns, mask, HAS_EDITS: tl.constexpr):
    """float32, -inf where masked. raw_ptr, edited_ptr: first logits of the row; below edited_end the latter is read."""
    if HAS_EDITS:
        raw = tl.load(raw_ptr + columns, mask=mask & (columns >= edited_end), other=-float("inf")).to(tl.float32)
        edited = tl.load(edited_ptr + columns, mask=mask & (columns < edited_end), other=-float("inf"))
        return tl.where(columns < edited_end, edited, raw)
    else:
        return tl.load(raw_ptr + columns, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def order_key(logits):
    """int32 in the order of float32 logits without NaN; -0 and 0 have one key."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of_key(key):
    """The inverse of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def next_float64(number, step: tl.constexpr):
    """The float64 after (step 1) or before (step -1) one that is not negative."""
    return (number.to(tl.int64, bitcast=True) + step).to(tl.float64, bitcast=True)

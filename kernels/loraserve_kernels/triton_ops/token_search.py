"""Draw a token by bisection over the whole row, if too many could be drawn to gather and sort them.

Reads the row 30 times for bfloat16 and twice as often for float32.
"""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from loraserve_kernels.triton_ops.logit_rows import load_logits, logit_of_key, next_float64, order_key

_SEARCHED = tl.constexpr(4096)
"""Logits per iteration of a pass."""
_ANY_NUMBER = tl.constexpr(2**31 - 1)


@triton.jit
def choose_by_search(
    raw_ptr,
    edited_ptr,
    edited_end,
    peak,
    floor,
    inverse_temperature,
    top_k,
    top_p,
    uniform,
    vocab_size,
    shift,
    HAS_EDITS: tl.constexpr,
):
    """Three bisections over keys: the k-th token, the nucleus's last, the drawn one; then its place among equal keys.

    All tokens above key `least` are kept, and the first `num_last` tokens with that key.
    """
    end = (order_key(peak) >> shift).to(tl.int64) + 1
    least = (tl.full([], -(2**31), tl.int32) >> shift).to(tl.int64)
    num_last = tl.full([], _ANY_NUMBER, tl.int32)
    args = (shift, peak, floor, inverse_temperature, vocab_size)
    count, total = _reaching(raw_ptr, edited_ptr, edited_end, least, *args, HAS_EDITS)
    if top_k < vocab_size:
        least = _last_key(raw_ptr, edited_ptr, edited_end, least, end, top_k, 0.0, *args, HAS_EDITS)
        count, mass = _reaching(raw_ptr, edited_ptr, edited_end, least + 1, *args, HAS_EDITS)
        num_last = top_k - count
        total = mass + num_last * _weight_of_key(least, shift, peak, floor, inverse_temperature)
    if top_p < 1:
        bound = top_p * total
        last = _last_key(raw_ptr, edited_ptr, edited_end, least, end, 0, bound, *args, HAS_EDITS)
        weight = _weight_of_key(last, shift, peak, floor, inverse_temperature)
        reaching, total = _reaching(raw_ptr, edited_ptr, edited_end, last, *args, HAS_EDITS)
        count, mass = _reaching(raw_ptr, edited_ptr, edited_end, last + 1, *args, HAS_EDITS)
        num_equal = tl.where(last == least, tl.minimum(reaching - count, num_last), reaching - count)
        needed = tl.maximum((bound - mass) / weight, 0.0)
        num_needed = needed.to(tl.int64)
        num_needed += (num_needed < needed).to(tl.int64)  # rounded up
        num_last = tl.maximum(tl.minimum(num_needed, num_equal.to(tl.int64)), 1).to(tl.int32)
        least = last
        total = mass + num_last * weight
    target = tl.minimum(uniform * total, next_float64(total, -1))
    drawn = _last_key(raw_ptr, edited_ptr, edited_end, least, end, 0, next_float64(target, 1), *args, HAS_EDITS)
    reaching, total = _reaching(raw_ptr, edited_ptr, edited_end, drawn, *args, HAS_EDITS)
    count, mass = _reaching(raw_ptr, edited_ptr, edited_end, drawn + 1, *args, HAS_EDITS)
    num_equal = tl.where(drawn == least, tl.minimum(reaching - count, num_last), reaching - count)
    past = tl.maximum((target - mass) / _weight_of_key(drawn, shift, peak, floor, inverse_temperature), 0.0)
    place = tl.minimum(past.to(tl.int64), num_equal.to(tl.int64) - 1).to(tl.int32)
    return _nth_of_key(raw_ptr, edited_ptr, edited_end, drawn, shift, place, vocab_size, HAS_EDITS)


@triton.jit
def _weights_of(logits, peak, floor, inverse_temperature):
    return tl.where(logits >= floor, tl.exp((logits - peak) * inverse_temperature), 0.0)


@triton.jit
def _reaching(
    raw_ptr, edited_ptr, edited_end, key, shift, peak, floor, inverse_temperature, vocab_size, HAS_EDITS: tl.constexpr
):
    """(number int32, mass float64) of tokens whose shifted key is at least `key`; the mass is a sum of float32 sums.

    The program's threads synchronize once, after the last logit, not after every `_SEARCHED` logits.
    """
    counts = tl.zeros([_SEARCHED], tl.int32)
    masses = tl.zeros([_SEARCHED], tl.float32)
    for start in range(0, vocab_size, _SEARCHED):
        columns = start + tl.arange(0, _SEARCHED)
        logits = load_logits(raw_ptr, edited_ptr, edited_end, columns, columns < vocab_size, HAS_EDITS)
        is_in = (columns < vocab_size) & ((order_key(logits) >> shift) >= key)
        counts += is_in.to(tl.int32)
        masses += tl.where(is_in, _weights_of(logits, peak, floor, inverse_temperature), 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses.to(tl.float64), axis=0)


@triton.jit
def _last_key(
    raw_ptr,
    edited_ptr,
    edited_end,
    low,
    end,
    min_count,
    min_mass,
    shift,
    peak,
    floor,
    inverse_temperature,
    vocab_size,
    HAS_EDITS: tl.constexpr,
):
    """The largest shifted key below `end` that min_count tokens of min_mass reach; `low` is assumed to be one."""
    while end - low > 1:
        middle = (low + end) >> 1
        count, mass = _reaching(
            raw_ptr, edited_ptr, edited_end, middle, shift, peak, floor, inverse_temperature, vocab_size, HAS_EDITS
        )
        is_reached = (count >= min_count) & (mass >= min_mass)
        low = tl.where(is_reached, middle, low)
        end = tl.where(is_reached, end, middle)
    return low


@triton.jit
def _weight_of_key(key, shift, peak, floor, inverse_temperature):
    """Weight of each token with this shifted key: float64, at least the smallest positive float32."""
    low_bits = tl.where(key < 0, (tl.full([], 1, tl.int64) << shift) - 1, 0)
    logit = logit_of_key(((key << shift) | low_bits).to(tl.int32))
    return tl.maximum(_weights_of(logit, peak, floor, inverse_temperature), 1e-45).to(tl.float64)


@triton.jit
def _nth_of_key(raw_ptr, edited_ptr, edited_end, key, shift, place, vocab_size, HAS_EDITS: tl.constexpr):
    """The id of token number `place` (from 0, by ascending id) among those with this shifted key."""
    token_id = tl.full([], -1, tl.int32)
    num_before = tl.full([], 0, tl.int32)
    start = 0
    while (start < vocab_size) & (token_id < 0):
        columns = start + tl.arange(0, _SEARCHED)
        logits = load_logits(raw_ptr, edited_ptr, edited_end, columns, columns < vocab_size, HAS_EDITS)
        is_equal = (columns < vocab_size) & ((order_key(logits) >> shift) == key)
        places = num_before + tl.cumsum(is_equal.to(tl.int32), axis=0) - 1
        token_id = tl.max(tl.where(is_equal & (places == place), columns, -1), axis=0)
        num_before += tl.sum(is_equal.to(tl.int32), axis=0)
        start += _SEARCHED
    return token_id

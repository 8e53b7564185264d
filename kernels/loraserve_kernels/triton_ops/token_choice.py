"""Second sampling stage: one program per row draws the row's token.

With top_k or top_p only a few tokens can be drawn. At least k tokens have logits not below the k-th largest lane
maximum; these tokens are gathered, sorted and drawn from in float64, as on the CPU. If that is not enough (top_k above
`_MAX_WANTED`, a nucleus of more than `_PROBE` tokens, or very many equal logits), thresholds are searched for over the
whole row: see `token_search`.
"""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from loraserve_kernels.triton_ops.launch import wait_for_inputs
from loraserve_kernels.triton_ops.logit_rows import columns_if, load_logits, logit_of_key, next_float64, order_key
from loraserve_kernels.triton_ops.token_search import choose_by_search

_MAX_WANTED = tl.constexpr(1024)
"""The largest top_k that is gathered and sorted."""
_PROBE = tl.constexpr(512)
"""Number of top tokens in which a nucleus is searched for first, as on the CPU."""
_MAX_CANDIDATES = tl.constexpr(2048)
"""Maximum number of tokens sorted, and of lanes gathered from: the wanted ones and those that tie with the last."""
_GATHERED_LANES = tl.constexpr(32)
"""Lanes per iteration."""
_LEAST_NUMBER = tl.constexpr(-(2**31) + 2**23)
"""The `order_key` of the least finite logit."""
_NONE = tl.constexpr(2**31 - 1)

MIN_LANES = 512
"""Smaller vocabularies share one compiled kernel."""


@triton.jit(do_not_specialize=["vocab_size", "row_stride", "num_lanes"])  # recompiling takes seconds
def choose_kernel(
    raw_ptr,
    edited_ptr,
    is_edited_ptr,
    peak_ptr,
    lane_max_ptr,
    lane_mass_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    seed_ptr,
    position_ptr,
    lane_list_ptr,
    candidate_ptr,
    token_ids_ptr,
    vocab_size,
    row_stride,
    num_lanes,
    least_temperature,
    HAS_EDITS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """KEY_SHIFT: low bits of an unedited row's `order_key` without information. LANES: a power of two >= num_lanes."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    peak = tl.load(peak_ptr + row)
    if (temperature < least_temperature) | (peak == float("inf")):
        return
    edited_end = tl.full([], 0, tl.int32)
    if HAS_EDITS:
        edited_end = columns_if(is_edited_ptr + row, vocab_size)
    raw_ptr += row * row_stride
    edited_ptr += row * vocab_size
    lane_max_ptr += row * num_lanes
    lane_mass_ptr += row * num_lanes
    lane_list_ptr += row * _MAX_CANDIDATES
    candidate_ptr += row * _MAX_CANDIDATES
    top_p = tl.load(top_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    top_k = tl.where(has_top_k, top_k, vocab_size)
    floor = (peak.to(tl.float64) + temperature * tl.load(log_min_p_ptr + row)).to(tl.float32)
    uniform = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    token_id = tl.full([], -1, tl.int32)
    if has_top_k | (top_p < 1):
        most_narrow = num_lanes * 3 // 4
        wanted = tl.where(has_top_k, top_k, tl.maximum(1, tl.minimum(_PROBE, most_narrow)))
        if (has_top_k == 0) | (wanted <= tl.minimum(_MAX_WANTED, most_narrow)):
            num_candidates = _gather_candidates(
                raw_ptr,
                edited_ptr,
                edited_end,
                lane_max_ptr,
                lane_list_ptr,
                candidate_ptr,
                wanted,
                vocab_size,
                num_lanes,
                HAS_EDITS,
                LENGTH,
                LANES,
            )
            if num_candidates <= _MAX_CANDIDATES:
                total = tl.full([], -1.0, tl.float64)
                if has_top_k == 0:
                    lane = tl.arange(0, LANES)
                    masses = tl.load(lane_mass_ptr + lane, mask=lane < num_lanes, other=0.0)
                    total = tl.sum(masses.to(tl.float64), axis=0)
                token_id = _choose_of_candidates(
                    candidate_ptr, num_candidates, total, peak, floor, temperature, top_k, top_p, uniform
                )
        if token_id < 0:
            token_id = choose_by_search(
                raw_ptr,
                edited_ptr,
                edited_end,
                peak,
                floor,
                (1.0 / temperature).to(tl.float32),
                top_k,
                top_p,
                uniform,
                vocab_size,
                tl.where(edited_end > 0, 0, KEY_SHIFT),
                HAS_EDITS,
            )
    else:
        token_id = _choose_of_all(
            raw_ptr,
            edited_ptr,
            edited_end,
            lane_mass_ptr,
            peak,
            floor,
            temperature,
            uniform,
            vocab_size,
            num_lanes,
            HAS_EDITS,
            LENGTH,
            LANES,
        )
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))


@triton.jit
def _uniform(seed, position):
    """A number in [0, 1), 53 random bits: see `sampling_noise.uniform`."""
    state = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    bits = _mix(state + (position.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.float64) * 2.0**-53


@triton.jit
def _mix(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _first_past(weights, cumulative, is_kept, target, PLACES: tl.constexpr):
    """The first kept place with weight whose cumulative weight is above target; if rounding left none, the last."""
    place = tl.arange(0, PLACES)
    is_possible = is_kept & (weights > 0)
    first = tl.min(tl.where(is_possible & (cumulative > target), place, _NONE), axis=0)
    last = tl.max(tl.where(is_possible, place, 0), axis=0)
    return tl.minimum(first, last)


@triton.jit
def _choose_of_all(
    raw_ptr,
    edited_ptr,
    edited_end,
    lane_mass_ptr,
    peak,
    floor,
    temperature,
    uniform,
    vocab_size,
    num_lanes,
    HAS_EDITS: tl.constexpr,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
):
    lanes = tl.arange(0, LANES)
    masses = tl.load(lane_mass_ptr + lanes, mask=lanes < num_lanes, other=0.0).to(tl.float64)
    cumulative = tl.cumsum(masses, axis=0)
    total = tl.max(cumulative, axis=0)
    target = tl.minimum(uniform * total, next_float64(total, -1))
    lane = _first_past(masses, cumulative, lanes < num_lanes, target, LANES)
    mass = tl.sum(tl.where(lanes == lane, masses, 0.0), axis=0)
    before = tl.sum(tl.where(lanes == lane, cumulative - masses, 0.0), axis=0)
    inner_uniform = tl.maximum((target - before) / mass, 0.0)
    columns = lane + tl.arange(0, LENGTH) * num_lanes
    logits = load_logits(raw_ptr, edited_ptr, edited_end, columns, columns < vocab_size, HAS_EDITS)
    weights = tl.exp((logits.to(tl.float64) - peak.to(tl.float64)) / temperature)
    weights = tl.where((columns < vocab_size) & (logits >= floor), weights, 0.0)
    cumulative = tl.cumsum(weights, axis=0)
    total = tl.max(cumulative, axis=0)
    target = tl.minimum(inner_uniform * total, next_float64(total, -1))
    return lane + num_lanes * _first_past(weights, cumulative, columns < vocab_size, target, LENGTH)


@triton.jit
def _gather_candidates(
    raw_ptr,
    edited_ptr,
    edited_end,
    lane_max_ptr,
    lane_list_ptr,
    candidate_ptr,
    wanted,
    vocab_size,
    num_lanes,
    HAS_EDITS: tl.constexpr,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the finite logits not below the `wanted`-th largest lane maximum, as keys that sort best first; count them.

    A count above `_MAX_CANDIDATES` means that there are too many, and the written keys are unusable.
    """
    lanes = tl.arange(0, LANES)
    maxima = tl.load(lane_max_ptr + lanes, mask=lanes < num_lanes, other=-float("inf"))
    keys = tl.where(lanes < num_lanes, order_key(maxima), -(2**31)).to(tl.int64)
    threshold = tl.full([], -(2**31), tl.int64)
    step = tl.full([], 2**31, tl.int64)
    for _ in range(32):
        is_reached = tl.sum((keys >= threshold + step).to(tl.int32), axis=0) >= wanted
        threshold += tl.where(is_reached, step, 0)
        step = step >> 1
    # If only a few tokens are allowed, all others are -inf: without weight, and too many to be candidates.
    threshold = tl.maximum(threshold, _LEAST_NUMBER)
    is_listed = (lanes < num_lanes) & (keys >= threshold)
    places = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    num_listed = tl.sum(is_listed.to(tl.int32), axis=0)
    tl.store(lane_list_ptr + places, lanes, mask=is_listed & (places < _MAX_CANDIDATES))
    tl.debug_barrier()  # threads read what others wrote
    num_candidates = tl.where(num_listed <= _MAX_CANDIDATES, 0, _NONE)
    start = 0
    while (start < num_listed) & (num_candidates <= _MAX_CANDIDATES):
        listed = start + tl.arange(0, _GATHERED_LANES)
        lane = tl.load(lane_list_ptr + listed, mask=listed < num_listed, other=0)
        columns = lane[:, None] + tl.arange(0, LENGTH)[None, :] * num_lanes
        mask = (listed < num_listed)[:, None] & (columns < vocab_size)
        logits = load_logits(raw_ptr, edited_ptr, edited_end, columns, mask, HAS_EDITS)
        key = order_key(logits)
        is_candidate = tl.reshape(mask & (key.to(tl.int64) >= threshold), [_GATHERED_LANES * LENGTH])
        entry = tl.reshape(((~key).to(tl.int64) << 32) | columns.to(tl.int64), [_GATHERED_LANES * LENGTH])
        target = num_candidates + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
        tl.store(candidate_ptr + target, entry, mask=is_candidate & (target < _MAX_CANDIDATES))
        num_candidates += tl.sum(is_candidate.to(tl.int32), axis=0)
        start += _GATHERED_LANES
    tl.debug_barrier()
    return num_candidates


@triton.jit
def _ascending(values, num_values, PLACES: tl.constexpr):
    """Sort values, of which at most the first `num_values` are below the largest integer (Batcher's bitonic network).

    Takes 15 exchanges for up to 32 values and 66 for 2048; `tl.sort` always takes those for its array's size.
    """
    place = tl.arange(0, PLACES)
    size = 2
    while size < 2 * num_values:
        stride = size // 2
        while stride > 0:
            others = tl.gather(values, place ^ stride, axis=0)
            takes_least = ((place & stride) == 0) == ((place & size) == 0)
            values = tl.where(takes_least, tl.minimum(values, others), tl.maximum(values, others))
            stride = stride // 2
        size = size * 2
    return values


@triton.jit
def _choose_of_candidates(candidate_ptr, num_candidates, total, peak, floor, temperature, top_k, top_p, uniform):
    """A token id; -1 if the nucleus is larger. total: the weight of which top_p is a share; negative = the top_k's."""
    places = tl.arange(0, _MAX_CANDIDATES)
    is_candidate = places < num_candidates
    entries = tl.load(candidate_ptr + places, mask=is_candidate, other=2**63 - 1)
    entries = _ascending(entries, num_candidates, _MAX_CANDIDATES)
    logits = tl.where(is_candidate, logit_of_key((~(entries >> 32)).to(tl.int32)), peak)
    weights = tl.exp((logits.to(tl.float64) - peak.to(tl.float64)) / temperature)
    weights = tl.where(is_candidate & (places < top_k) & (logits >= floor), weights, 0.0)
    cumulative = tl.cumsum(weights, axis=0)
    found = tl.max(cumulative, axis=0)
    bound = tl.where(top_p < 1, top_p * tl.where(total < 0, found, total), float("inf"))
    is_kept = is_candidate & ((places == 0) | (cumulative - weights < bound))
    kept_total = tl.max(tl.where(is_kept, cumulative, 0.0), axis=0)
    target = tl.minimum(uniform * kept_total, next_float64(kept_total, -1))
    place = _first_past(weights, cumulative, is_kept, target, _MAX_CANDIDATES)
    token_id = tl.sum(tl.where(places == place, entries & 0x7FFFFFFF, 0), axis=0).to(tl.int32)
    return tl.where((total < 0) | (found >= bound), token_id, -1)


MAX_CANDIDATES = _MAX_CANDIDATES.value

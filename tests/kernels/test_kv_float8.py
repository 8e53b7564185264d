"""Float8 caches in every backend: the values written to them, and attention over these values."""

import pytest
import torch
from loraserve_kernels import attention_work
from loraserve_kernels.kv_float8 import KV_FLOAT8, indexable, to_kv_float8
from loraserve_kernels.kv_write import KvWriteInputs, make_kv_write_inputs
from loraserve_kernels.paged_attention import AttentionInputs, make_attention_inputs, paged_attention_reference
from loraserve_kernels.rotary_kv_write import make_rotary_inputs
from torch import Tensor

NAN_BITS = 0x7F


def nearest(x: Tensor) -> Tensor:
    """The nearest finite e4m3 values, found by trying all; of two as near, the one with an even mantissa. float64."""
    codes = torch.arange(256, dtype=torch.uint8, device=x.device)
    values = codes.view(KV_FLOAT8).double()
    codes, values = codes[values.isfinite()], values[values.isfinite()]
    distance = (x.double()[..., None] - values).abs()
    is_nearest = distance == distance.amin(-1, keepdim=True)
    return values[(is_nearest * (2 - codes % 2)).argmax(-1)]


def slots(cache: Tensor) -> Tensor:
    """[num_slots, num_kv_heads, head_dim] in float64."""
    return cache.double().transpose(1, 2).flatten(0, 1)


def write(backend, inputs: KvWriteInputs) -> None:
    backend.kv_write(inputs.k, inputs.v, inputs.k_cache, inputs.v_cache, inputs.slot_mapping)


def test_writes_the_nearest_values_and_nothing_else(backend, device, dtype, kv_float8):
    inputs = make_kv_write_inputs(37, 3, 40, 7, dtype, device, kv_dtype=kv_float8)
    generator = torch.Generator().manual_seed(1)
    for rows in (inputs.k, inputs.v):  # from less than half of the smallest value to more than the largest
        rows *= 2.0 ** torch.randint(-14, 12, rows.shape, generator=generator).to(device, dtype)
    write(backend, inputs)
    for rows, cache in ((inputs.k, inputs.k_cache), (inputs.v, inputs.v_cache)):
        found, expected = slots(cache), nearest(rows)
        assert expected.abs().max() == 448.0
        assert (rows.abs() > 500.0).any()
        assert ((expected == 0.0) & (rows != 0.0)).any()
        assert torch.equal(found[inputs.slot_mapping], expected)
        unused = torch.ones(len(found), dtype=torch.bool, device=device)
        unused[inputs.slot_mapping] = False
        assert found[unused].isnan().all()


def test_values_that_are_not_finite_are_stored_as_nan(backend, device, kv_float8):
    inputs = make_kv_write_inputs(5, 2, 16, device=device, kv_dtype=kv_float8)
    broken = torch.zeros(inputs.k.shape, dtype=torch.bool, device=device)
    for row, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        inputs.k[row, 1, 3 + row] = inputs.v[row, 1, 3 + row] = value
        broken[row, 1, 3 + row] = True
    write(backend, inputs)
    for cache in (inputs.k_cache, inputs.v_cache):
        assert torch.equal(slots(cache)[inputs.slot_mapping].isnan(), broken)


def wrong_by(found: Tensor, exact: Tensor) -> float:
    """The largest error beyond that of the nearest e4m3 value, relative to the exact value."""
    excess = (found - exact).abs() - (nearest(exact) - exact).abs()
    return float((excess / exact.abs().clamp(min=0.1)).max())


@pytest.mark.parametrize("rotary_dim", [16, 6])
def test_rounds_rotated_keys_once(backend, device, dtype, assert_close, kv_float8, rotary_dim):
    inputs = make_rotary_inputs(40, 4, 2, 16, rotary_dim, dtype, device, kv_dtype=kv_float8)
    kv, half = inputs.kv, rotary_dim // 2
    cos, sin = inputs.cos[:, None, :half].double(), inputs.sin[:, None, :half].double()

    def rotated(x: Tensor, factor: float = 1.0) -> Tensor:
        low, high, rest = x.double().split([half, half, x.shape[2] - rotary_dim], dim=2)
        return torch.cat([low * cos - high * sin * factor, high * cos + low * sin * factor, rest], dim=2)

    q = rotated(inputs.q)
    backend.rotary_kv_write(inputs.q, kv.k, kv.v, inputs.cos, inputs.sin, kv.k_cache, kv.v_cache, kv.slot_mapping)
    assert_close(inputs.q.clone(), q)
    found = slots(kv.k_cache)[kv.slot_mapping]
    assert wrong_by(found, rotated(kv.k)) < 1e-4
    assert wrong_by(found, rotated(kv.k, factor=1.02)) > 1e-3, "a planted error must show"
    assert torch.equal(slots(kv.v_cache)[kv.slot_mapping], nearest(kv.v))


def attend(backend, inputs: AttentionInputs, **options) -> Tensor:
    return backend.paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, **options)


def expected(inputs: AttentionInputs, **options) -> Tensor:
    """Attention in float64 over the values in the caches."""
    caches = inputs.k_cache.double(), inputs.v_cache.double()
    return paged_attention_reference(inputs.q.double(), *caches, inputs.batch, **options)


SHAPES = [
    # context_lens, num_rows, num_heads, num_kv_heads, head_dim, block_size, options
    pytest.param([1, 900, 129], [1, 1, 1], 3, 1, 16, 16, {}, id="decode-in-parts"),
    pytest.param([257, 600], [1, 1], 8, 2, 64, 16, {"sliding_window": 128, "softcap": 4.0}, id="decode-window-softcap"),
    pytest.param([65, 16], [1, 1], 4, 1, 80, 24, {"sinks": True}, id="decode-sinks-80"),
    pytest.param([5, 40, 130, 1], [1, 33, 2, 1], 6, 2, 40, 16, {}, id="mixed"),
    pytest.param([200], [60], 8, 1, 128, 32, {"softcap": 3.0, "sinks": True}, id="prefill-softcap-sinks"),
    pytest.param([150], [150], 2, 1, 32, 16, {"sliding_window": 30}, id="prefill-window"),
]


@pytest.mark.parametrize("few_rows", [0, 256], ids=["prefilled", "appended"])
@pytest.mark.parametrize(("contexts", "rows", "heads", "kv_heads", "head_dim", "block_size", "options"), SHAPES)
def test_attends_to_the_values_in_the_caches(
    backend,
    device,
    dtype,
    assert_close,
    monkeypatch,
    kv_float8,
    contexts,
    rows,
    heads,
    kv_heads,
    head_dim,
    block_size,
    options,
    few_rows,
):
    monkeypatch.setattr(attention_work, "FEW_ROWS", few_rows)
    inputs = make_attention_inputs(contexts, rows, heads, kv_heads, head_dim, block_size, dtype, device, 0, kv_float8)
    options = {"scaling": head_dim**-0.5, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 3, heads).to(device, dtype)
    assert_close(attend(backend, inputs, **options), expected(inputs, **options))


def test_the_tolerance_distinguishes_a_float8_cache_from_an_exact_one(backend, device, dtype, assert_close, kv_float8):
    inputs = make_attention_inputs([40], [4], 2, 1, 16, dtype=dtype, device=device, kv_dtype=kv_float8)
    exact = make_attention_inputs([40], [4], 2, 1, 16, dtype=dtype, device=device)
    assert torch.equal(inputs.q, exact.q)
    with pytest.raises(AssertionError):
        assert_close(attend(backend, inputs, scaling=0.25), expected(exact, scaling=0.25))


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_a_nan_in_a_context_affects_only_its_own_sequence(backend, device, kv_float8, which):
    inputs = make_attention_inputs([20, 33], [1, 1], 2, 2, 16, device=device, kv_dtype=kv_float8)
    assert not attend(backend, inputs, scaling=0.25).isnan().any()
    block = int(inputs.batch.block_table[1, 1])
    indexable(getattr(inputs, which))[block, :, 5, 3] = NAN_BITS
    found = attend(backend, inputs, scaling=0.25)
    broken, whole = int(inputs.batch.row_start[1]), int(inputs.batch.row_start[0])
    assert found[broken].isnan().flatten(1).any(1).all()
    assert not found[whole].isnan().any()


def test_a_cache_of_any_other_dtype_than_the_rows_is_still_refused(backend, device):
    inputs = make_attention_inputs([5], [2], 4, 2, 16, device=device, kv_dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"q.dtype is torch.float32, expected torch.float8_e5m2, as the caches"):
        attend(backend, inputs, scaling=0.25)
    kv = make_kv_write_inputs(5, 2, 16, device=device, kv_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"k.dtype is torch.float32, expected torch.float16, as the caches"):
        write(backend, kv)


def test_all_codes_survive_being_read_and_written_again():
    codes = torch.arange(256, dtype=torch.uint8)
    again = to_kv_float8(codes.view(KV_FLOAT8).float()).view(torch.uint8)
    assert torch.equal(again[codes.view(KV_FLOAT8).float().isfinite()], codes[codes % 128 != NAN_BITS])
    assert (again[codes % 128 == NAN_BITS] % 128 == NAN_BITS).all()

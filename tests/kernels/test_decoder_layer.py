from dataclasses import replace

import pytest
import torch
from loraserve_kernels.composed_decoder_layer import ComposedDecoderLayer, ComposedDecoderLayers
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.decoder_layer import DecoderLayer, DecoderLayerParts
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from tests.support.decoder_cases import CASES, DORA, HIDDEN, INTERMEDIATE, add_dora, make_case, make_parts


@pytest.fixture
def cpu(library: CpuLibrary) -> CpuBackend:
    return CpuBackend(library)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def fused(backend: CpuBackend, parts: DecoderLayerParts) -> DecoderLayer:
    layer = backend.decoder_layer(parts)
    assert layer is not None
    return layer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_adapters", [False, True], ids=["base", "adapters"])
def test_a_fused_layer_matches_the_separate_ops_bit_for_bit(cpu, dtype, name, with_adapters):
    parts = make_parts(cpu, dtype)
    case = make_case(name, dtype, with_adapters=with_adapters)
    for found, expected in zip(case.run(fused(cpu, parts)), case.run(ComposedDecoderLayer(parts, cpu)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dora", DORA)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_fused_layer_with_dora_matches_the_separate_ops_bit_for_bit(cpu, dtype, name, dora, bias):
    parts = make_parts(cpu, dtype, bias=bias)
    case = make_case(name, dtype)
    assert case.table is not None
    without, _, _ = case.run(fused(cpu, parts))
    add_dora(case.table, *DORA[dora])
    found = case.run(fused(cpu, parts))
    for each, expected in zip(found, case.run(ComposedDecoderLayer(parts, cpu)), strict=True):
        assert torch.equal(each, expected)
    assert not torch.equal(found[0], without)


@pytest.mark.parametrize("variant", ["head norms", "bias", "no rotary", "window", "softcap"])
def test_a_fused_layer_with_an_optional_part_matches_the_separate_ops_bit_for_bit(cpu, dtype, variant):
    parts = make_parts(cpu, dtype, head_norms=variant == "head norms", bias=variant == "bias")
    parts = replace(parts, sliding_window=20 if variant == "window" else None)
    parts = replace(parts, softcap=2.0 if variant == "softcap" else None)
    case = make_case("mixed", dtype, with_rotary=variant != "no rotary")
    for found, expected in zip(case.run(fused(cpu, parts)), case.run(ComposedDecoderLayer(parts, cpu)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_adapters", [False, True], ids=["base", "adapters"])
def test_layers_fused_into_one_op_match_one_layer_after_another_bit_for_bit(cpu, dtype, name, with_adapters):
    """The layers have different parts."""
    plain = make_parts(cpu, dtype)
    parts = [plain, make_parts(cpu, dtype, head_norms=True, bias=True), replace(plain, sliding_window=20), plain]
    if not with_adapters:
        parts.insert(1, make_parts(cpu, dtype, intermediate=5 * INTERMEDIATE))
    layers = [fused(cpu, part) for part in parts]
    together = cpu.decoder_layers(layers)
    assert together is not None
    case = make_case(name, dtype, with_adapters=with_adapters)
    one_by_one, at_once = [
        [(case.k_cache.clone(), case.v_cache.clone()) for _ in layers] for _ in ("one by one", "at once")
    ]
    rows = case.x
    for layer, (k_cache, v_cache) in zip(layers, one_by_one, strict=True):
        rows = layer(rows, case.rotary, k_cache, v_cache, case.batch, case.table)

    k_caches, v_caches = zip(*at_once, strict=True)
    for _ in range(2):  # into the same slots: the first run must leave no state behind
        assert torch.equal(together(case.x, case.rotary, k_caches, v_caches, case.batch, case.table), rows)
    for found, expected in zip(at_once, one_by_one, strict=True):
        for cache, expected_cache in zip(found, expected, strict=True):
            assert torch.equal(cache.nan_to_num(), expected_cache.nan_to_num())


@pytest.mark.parametrize("name", CASES)
def test_composed_layers_match_one_after_another_bit_for_bit_and_fuse_the_additions_between_them(
    cpu, dtype, name, monkeypatch
):
    parts = [make_parts(cpu, dtype), make_parts(cpu, dtype, head_norms=True, bias=True), make_parts(cpu, dtype)]
    layers = [ComposedDecoderLayer(each, cpu) for each in parts]
    case = make_case(name, dtype)
    caches = [(case.k_cache.clone(), case.v_cache.clone()) for _ in layers]
    rows = case.x
    for layer, (k_cache, v_cache) in zip(layers, caches, strict=True):
        rows = layer(rows, case.rotary, k_cache, v_cache, case.batch, case.table)

    calls, add_rms_norm = [], cpu.add_rms_norm
    monkeypatch.setattr(cpu, "add_rms_norm", lambda *args: calls.append(args) or add_rms_norm(*args))
    k_caches, v_caches = zip(*[(case.k_cache.clone(), case.v_cache.clone()) for _ in layers], strict=True)
    together = ComposedDecoderLayers(layers)
    assert torch.equal(together(case.x, case.rotary, k_caches, v_caches, case.batch, case.table), rows)
    assert len(calls) == 2 * len(layers) - 1
    for k_cache, v_cache, expected in zip(k_caches, v_caches, caches, strict=True):
        assert torch.equal(k_cache.nan_to_num(), expected[0].nan_to_num())
        assert torch.equal(v_cache.nan_to_num(), expected[1].nan_to_num())


def test_an_index_out_of_range_for_one_of_several_layers_changes_no_cache(cpu, dtype):
    case = make_case("decode", dtype)
    assert case.table is not None
    layers = cpu.decoder_layers([fused(cpu, make_parts(cpu, dtype)), fused(cpu, make_parts(cpu, dtype))])
    assert layers is not None
    whole, short = case.k_cache.clone(), case.k_cache[:1].clone()
    with pytest.raises(ValueError, match=r"block|slot"):
        layers(case.x, case.rotary, (whole, short), (whole.clone(), short.clone()), case.batch, case.table)
    assert torch.equal(whole.nan_to_num(), case.k_cache.nan_to_num())


def test_layers_of_other_backends_or_dtypes_are_not_fused_into_one_op(cpu):
    layer = fused(cpu, make_parts(cpu, torch.float32))
    assert cpu.decoder_layers([layer, fused(cpu, make_parts(cpu, torch.bfloat16))]) is None
    assert cpu.decoder_layers([layer, ComposedDecoderLayer(make_parts(cpu, torch.float32), cpu)]) is None


def test_a_rows_bits_do_not_depend_on_the_batch(cpu, dtype):
    layer = fused(cpu, make_parts(cpu, dtype))
    case = make_case("mixed", dtype, with_adapters=False)
    whole, _, _ = case.run(layer)
    batch = case.batch
    assert case.rotary is not None
    for sequence, (first, count) in enumerate(zip(batch.row_start.tolist(), batch.num_rows.tolist(), strict=True)):
        one, rows = slice(sequence, sequence + 1), slice(first, first + count)
        alone = replace(
            batch,
            slot_mapping=batch.slot_mapping[rows],
            block_table=batch.block_table[one],
            context_lens=batch.context_lens[one],
            row_start=torch.zeros(1, dtype=torch.int32),
            num_rows=batch.num_rows[one],
        )
        cos, sin = (factor[:, rows] for factor in case.rotary)
        out, _, _ = replace(case, x=case.x[rows], rotary=(cos, sin), batch=alone).run(layer)
        assert torch.equal(out, whole[rows])


def test_an_index_out_of_range_changes_nothing(cpu, dtype):
    layer = fused(cpu, make_parts(cpu, dtype))
    case = make_case("decode", dtype)
    before = case.k_cache.nan_to_num()
    for name, wrong, message in (("slot_mapping", 1 << 40, "slot_mapping"), ("context_lens", 1 << 20, "row ranges")):
        tensor = getattr(case.batch, name).clone()
        tensor[-1] = wrong
        broken = replace(case.batch, **{name: tensor})
        with pytest.raises(ValueError, match=message):
            layer(case.x, case.rotary, case.k_cache, case.v_cache, broken, case.table)
        assert torch.equal(case.k_cache.nan_to_num(), before)


def test_a_magnitude_outside_the_arena_changes_nothing(cpu, dtype):
    layer = fused(cpu, make_parts(cpu, dtype))
    case = make_case("decode", dtype)
    assert case.table is not None
    add_dora(case.table, (2,))
    case.table.offset_magnitude[2, 6] = case.table.arena.numel()
    before = case.k_cache.nan_to_num()
    with pytest.raises(ValueError, match="arena"):
        layer(case.x, case.rotary, case.k_cache, case.v_cache, case.batch, case.table)
    assert torch.equal(case.k_cache.nan_to_num(), before)


def test_refuses_tensors_of_wrong_shapes_and_dtypes(cpu, dtype):
    layer = fused(cpu, make_parts(cpu, dtype))
    case = make_case("decode", dtype)
    for change, match in (
        ({"x": case.x[:, :-1]}, "x is"),
        ({"x": case.x[:-1]}, "x is"),
        ({"x": case.x.half()}, "x.dtype"),
        ({"k_cache": case.k_cache[:, :1]}, "k_cache"),
        ({"rotary": (case.x, case.x)}, "cos"),
        ({"batch": replace(case.batch, context_lens=case.batch.context_lens[1:])}, "context_lens is"),
        ({"batch": replace(case.batch, block_table=case.batch.block_table[0])}, "block_table is"),
        ({"batch": with_segments_of(case.batch, start=case.batch.segments.start[1:])}, "segments.start is"),
        ({"batch": with_segments_of(case.batch, start=case.batch.segments.start.long())}, "segments.start.dtype"),
    ):
        with pytest.raises(ValueError, match=match):
            replace(case, **change).run(layer)


def with_segments_of(batch: StepBatch, *, start: Tensor) -> StepBatch:
    return replace(batch, segments=replace(batch.segments, start=start))


def test_refuses_lora_groups_that_do_not_match_the_linears(cpu, dtype):
    """Otherwise their products would be added past the end of the linear's output."""
    parts = make_parts(cpu, dtype)
    groups = [*parts.lora_groups[:-1], replace(parts.lora_groups[-1], out_features=(HIDDEN + 1,))]
    with pytest.raises(ValueError, match="lora_groups"):
        cpu.decoder_layer(replace(parts, lora_groups=tuple(groups)))


def test_float16_linears_get_no_fused_layer(cpu):
    parts = make_parts(cpu, torch.float16)
    assert cpu.decoder_layer(parts) is None

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from loraserve_kernels.composed_decoder_layer import ComposedDecoderLayer
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.decoder_layer import Norm
from loraserve_kernels.decoder_model import DecoderModel, DecoderModelParts
from loraserve_kernels.draw import Draw
from loraserve_kernels.packed_linear import PackedLinear
from loraserve_kernels.prepacked_linear import PrepackedLinear, RowMajorLinear
from loraserve_kernels.reference_backend import ReferenceBackend
from loraserve_kernels.step_batch import Segments, StepBatch
from torch import Tensor

from tests.support.decoder_cases import (
    CASES,
    DORA,
    HEAD_DIM,
    HEAD_GROUP,
    HIDDEN,
    INTERMEDIATE,
    NUM_LOGITS,
    Case,
    add_dora,
    make_case,
    make_parts,
    random,
)

NUM_EMBEDDINGS, VOCAB, NUM_POSITIONS, NUM_LAYERS = 50, 4170, 1300, 3


@pytest.fixture
def cpu(library: CpuLibrary) -> CpuBackend:
    return CpuBackend(library)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def make_model_parts(
    backend: CpuBackend,
    dtype: torch.dtype,
    *,
    tied: bool = False,
    intermediate: int = INTERMEDIATE,
    bias: bool = False,
) -> DecoderModelParts:
    angles = torch.rand(NUM_POSITIONS, HEAD_DIM // 2, generator=torch.Generator().manual_seed(4)) * 6
    angles = torch.cat([angles, angles], dim=-1)
    layers = [
        backend.decoder_layer(make_parts(backend, dtype, head_norms=head_norms, bias=bias, intermediate=intermediate))
        for head_norms in (False, True, False)
    ]
    assert None not in layers
    head = random(NUM_LOGITS, HIDDEN, dtype=dtype, seed=22)
    head[VOCAB:] *= 10  # the largest logits belong to no token
    return DecoderModelParts(
        embedding=None if tied else random(NUM_EMBEDDINGS, HIDDEN, dtype=dtype, seed=20),
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
        layers=[layer for layer in layers if layer is not None],
        norm=Norm(1 + random(HIDDEN, dtype=dtype, seed=21, scale=0.2), 1e-5),
        head=backend.linear(head, random(NUM_LOGITS, dtype=dtype, seed=23), keep_weight=False),
        head_group=HEAD_GROUP,
        vocab_size=VOCAB,
    )


def make_model(backend: CpuBackend, parts: DecoderModelParts) -> DecoderModel:
    model = backend.decoder_model(parts)
    assert model is not None
    return model


def with_tokens(case: Case, sampled: slice | None = None) -> StepBatch:
    """The case's batch with tokens; samples every other row, or the rows of a slice."""
    batch = case.batch
    rows = torch.arange(len(batch.slot_mapping))
    sampled_rows = rows[slice(len(rows) % 2, None, 2) if sampled is None else sampled].clone()
    positions = [
        torch.arange(context - count, context)
        for context, count in zip(batch.context_lens.tolist(), batch.num_rows.tolist(), strict=True)
    ]
    return replace(
        batch,
        token_ids=rows * 7 % NUM_EMBEDDINGS,
        positions=torch.cat(positions),
        sampled_rows=sampled_rows,
        sampled_segments=segments_of(batch.segments, sampled_rows),
    )


def segments_of(segments: Segments, rows: Tensor) -> Segments:
    """The segments restricted to these rows; some may become empty."""
    start = torch.searchsorted(rows, segments.start.to(rows.dtype)).to(torch.int32)
    return Segments(start, segments.adapter_slot, segments.has_adapter)


def make_caches(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    return [case.k_cache.clone() for _ in range(NUM_LAYERS)], [case.v_cache.clone() for _ in range(NUM_LAYERS)]


def embedded(parts: DecoderModelParts, token_ids: Tensor) -> Tensor:
    if parts.embedding is not None:
        return parts.embedding[token_ids]
    assert isinstance(parts.head, PackedLinear)
    return parts.head.rows(token_ids)


SAMPLED = {"every other": None, "last": slice(-1, None), "all": slice(None), "none": slice(0)}


@pytest.mark.parametrize("sampled", SAMPLED)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_adapters", [False, True], ids=["base", "adapters"])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_a_fused_model_matches_the_separate_ops_bit_for_bit(cpu, dtype, name, with_adapters, sampled, tied):
    parts = make_model_parts(cpu, dtype, tied=tied)
    require_the_bits_of_the_separate_ops(cpu, parts, make_case(name, dtype, with_adapters=with_adapters), sampled)


@pytest.mark.parametrize("sampled", ["every other", "all"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dora", DORA)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_fused_model_with_dora_matches_the_separate_ops_bit_for_bit(cpu, dtype, name, dora, sampled, bias):
    """DoRA on the layers' linears and on `lm_head`, which has a bias in either case."""
    case = make_case(name, dtype)
    assert case.table is not None
    add_dora(case.table, *DORA[dora])
    require_the_bits_of_the_separate_ops(cpu, make_model_parts(cpu, dtype, bias=bias), case, sampled)


def require_the_bits_of_the_separate_ops(cpu: CpuBackend, parts: DecoderModelParts, case: Case, sampled: str) -> None:
    batch = with_tokens(case, SAMPLED[sampled])
    expected_caches, caches = make_caches(case), make_caches(case)
    rows = embedded(parts, batch.token_ids)
    rotary = parts.cos[batch.positions][None], parts.sin[batch.positions][None]
    for layer, k_cache, v_cache in zip(parts.layers, *expected_caches, strict=True):
        rows = layer(rows, rotary, k_cache, v_cache, batch, case.table)
    hidden = cpu.rms_norm(rows[batch.sampled_rows], parts.norm.weight, parts.norm.eps)
    logits = parts.head(hidden)
    if case.table is not None:
        cpu.lora_add(logits, hidden, HEAD_GROUP, case.table, batch.sampled_segments)

    model = make_model(cpu, parts)
    for _ in range(2):  # into the same slots: the first run must leave no state behind
        found = model(*caches, batch, case.table)
        assert found is not None
        assert torch.equal(found.logits, logits)
        assert found.best == cpu.argmax(logits, VOCAB)
        assert found.drawn == []
    for cache, expected in zip([*caches[0], *caches[1]], [*expected_caches[0], *expected_caches[1]], strict=True):
        assert torch.equal(cache.nan_to_num(), expected.nan_to_num())


def test_few_sampled_rows_of_many_on_many_threads_match_one_thread_bit_for_bit(cpu, dtype):
    """All rows are packed once for the first linears; then each thread packs the sampled rows for itself."""
    model = make_model(cpu, make_model_parts(cpu, dtype, intermediate=20 * INTERMEDIATE))
    case = make_case("mixed", dtype, with_adapters=False)
    batch = with_tokens(case, slice(-14, None))
    before, logits = torch.get_num_threads(), []
    try:
        for num_threads in (1, *[16] * 30):
            torch.set_num_threads(num_threads)
            found = model(*make_caches(case), batch, None)
            assert found is not None
            logits.append(found.logits.clone())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(other, logits[0]) for other in logits[1:])


def test_a_threads_first_step_may_have_no_rows(cpu, dtype):
    case = make_case("mixed", dtype)
    model, batch = make_model(cpu, make_model_parts(cpu, dtype)), with_tokens(case)
    empty = replace(
        batch,
        **{name: getattr(batch, name)[:0] for name in ("token_ids", "positions", "slot_mapping", "sampled_rows")},
        num_rows=torch.zeros_like(batch.num_rows),
        segments=segments_of(batch.segments, batch.slot_mapping[:0]),
        sampled_segments=segments_of(batch.segments, batch.slot_mapping[:0]),
    )
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(model, *make_caches(case), empty, case.table).result()
    assert found is not None
    assert len(found.logits) == 0


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_drawn_tokens_equal_those_of_the_separate_op(cpu, dtype, num_threads):
    """Some rows have no draw and one has two: a token depends on its draw alone."""
    model = make_model(cpu, make_model_parts(cpu, dtype))
    case = make_case("16 rows", dtype)
    choices = [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 40, 1.0, 0.0), (1.0, 0, 1.0, 0.1), (2.0, 300, 0.5, 0.0)]
    draws = [Draw(row, *choices[row % 5], seed=row - 3, position=7 * row) for row in (2, 0, 7, 11, 11, 9, 15, 3)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        for some in (draws, [], draws[3:]):
            found = model(*make_caches(case), replace(with_tokens(case, slice(None)), draws=some), case.table)
            assert found is not None
            assert found.drawn == cpu.draw(found.logits, VOCAB, some)
    finally:
        torch.set_num_threads(before)


def test_values_changed_in_place_in_a_batch_are_used(cpu, dtype):
    parts = make_model_parts(cpu, dtype)
    case = make_case("decode", dtype, with_adapters=False)
    batch = with_tokens(case)
    model = make_model(cpu, parts)

    def logits() -> Tensor:
        found = model(*make_caches(case), batch, None)
        assert found is not None
        return found.logits.clone()

    first = logits()
    batch.token_ids += 1
    second = logits()
    batch.token_ids -= 1
    assert not torch.equal(first, second)
    assert torch.equal(first, logits())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_flagged(cpu, dtype, value):
    parts = make_model_parts(cpu, dtype)
    case = make_case("16 rows", dtype, with_adapters=False)
    draws = [Draw(row, 1.0, 0, 1.0, 0.0, seed=0, position=row) for row in range(len(case.batch.slot_mapping))]
    batch = replace(with_tokens(case, slice(None)), draws=draws)
    assert parts.embedding is not None
    parts.embedding[batch.token_ids[3]] = value
    found = make_model(cpu, parts)(*make_caches(case), batch, None)
    assert found is not None
    assert found.best == cpu.argmax(found.logits, VOCAB)
    assert found.best is not None
    assert [row for row, is_finite in enumerate(found.best[1]) if not is_finite] == [3]
    assert found.drawn is not None
    assert [row for row, token_id in enumerate(found.drawn) if token_id < 0] == [3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", NUM_EMBEDDINGS),
        ("token_ids", -1),
        ("positions", NUM_POSITIONS),
        ("sampled_rows", 5),
        ("sampled_rows", 0),  # not ascending
    ],
)
def test_an_index_out_of_range_changes_nothing(cpu, dtype, name, value):
    case = make_case("decode", dtype)
    batch = with_tokens(case)
    getattr(batch, name)[-1] = value
    caches = make_caches(case)
    with pytest.raises(ValueError, match=r"token id, position or sampled row"):
        make_model(cpu, make_model_parts(cpu, dtype))(*caches, batch, case.table)
    assert all(torch.equal(cache.nan_to_num(), case.k_cache.nan_to_num()) for cache in caches[0])


def test_segments_of_the_sampled_rows_with_a_wrong_shape_are_refused(cpu, dtype):
    case = make_case("decode", dtype)
    batch = with_tokens(case)
    segments = replace(batch.sampled_segments, start=batch.sampled_segments.start[1:])
    with pytest.raises(ValueError, match=r"segments\.start is"):
        make_model(cpu, make_model_parts(cpu, dtype))(
            *make_caches(case), replace(batch, sampled_segments=segments), case.table
        )


@pytest.mark.parametrize(("draw", "message"), [({"row": 5}, "draw.row is 5"), ({"temperature": 0.0}, "temperature")])
def test_an_invalid_draw_changes_nothing(cpu, dtype, draw, message):
    case = make_case("decode", dtype)
    good = Draw(0, 1.0, 0, 1.0, 0.0, seed=0, position=0)
    batch = replace(with_tokens(case), draws=[good, good._replace(**draw)])
    caches = make_caches(case)
    with pytest.raises(ValueError, match=message):
        make_model(cpu, make_model_parts(cpu, dtype))(*caches, batch, case.table)
    assert all(torch.equal(cache.nan_to_num(), case.k_cache.nan_to_num()) for cache in caches[0])


def test_a_batch_whose_adapters_may_have_biases_is_left_to_the_layers(cpu, dtype):
    case = make_case("decode", dtype)
    assert case.table is not None
    model, batch = make_model(cpu, make_model_parts(cpu, dtype)), with_tokens(case)
    case.table.num_biased = 1
    caches = make_caches(case)
    assert model(*caches, batch, case.table) is None
    assert all(torch.equal(cache.nan_to_num(), case.k_cache.nan_to_num()) for cache in caches[0])


@pytest.mark.parametrize("part", ["embedding", "cos", "norm", "head", "head_group", "vocab_size"])
def test_parts_that_do_not_fit_are_refused_by_name(cpu, part):
    parts = make_model_parts(cpu, torch.float32)
    wrong = {
        "embedding": torch.randn(NUM_EMBEDDINGS, HIDDEN - 1),
        "cos": parts.cos[:-1],
        "norm": Norm(parts.norm.weight[:-1], 1e-5),
        "head": cpu.linear(torch.randn(8, HIDDEN + 1), None, keep_weight=False),
        "head_group": replace(HEAD_GROUP, out_features=(NUM_LOGITS - 1,)),
        "vocab_size": NUM_LOGITS + 1,
    }
    with pytest.raises(ValueError, match=part):
        cpu.decoder_model(replace(parts, **{part: wrong[part]}))


def test_unpacked_heads_composed_layers_and_the_reference_give_no_fused_model(cpu):
    parts = make_model_parts(cpu, torch.float32)
    weight = random(NUM_LOGITS, HIDDEN, dtype=torch.float32, seed=22)
    for head in (PrepackedLinear(weight), RowMajorLinear(weight, library=cpu.library)):
        assert cpu.decoder_model(replace(parts, head=head)) is None
    composed = ComposedDecoderLayer(make_parts(cpu, torch.float32), cpu)
    assert cpu.decoder_model(replace(parts, layers=[*parts.layers, composed])) is None
    assert ReferenceBackend().decoder_model(parts) is None

from dataclasses import dataclass, replace

import pytest
import torch
from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.backend import Linear
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.decoder_layer import ComposedDecoderLayer, DecoderLayer, DecoderLayerParts, Norm
from loraserve_kernels.paged_attention import make_attention_inputs
from loraserve_kernels.step_batch import Segments, StepBatch
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 6, 2, 32, 72, 100
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
GROUPS = (
    LoraGroup(0, 0, HIDDEN, (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)),
    LoraGroup(1, 3, HEADS * HEAD_DIM, (HIDDEN,)),
    LoraGroup(2, 4, HIDDEN, (INTERMEDIATE, INTERMEDIATE)),
    LoraGroup(3, 6, INTERMEDIATE, (HIDDEN,)),
)
RANKS = (4, 1, 9)
CASES = {  # context lengths and rows of each sequence
    "one row": ([5], [1]),
    "decode": ([40, 7, 70, 1, 33], [1] * 5),
    "16 rows": ([9] * 16, [1] * 16),
    "mixed": ([50, 12, 90, 3], [1, 12, 37, 1]),
    "long prompt": ([300], [300]),
    "split spans": ([1200], [1]),
}


@dataclass(slots=True)
class Case:
    x: Tensor
    rotary: tuple[Tensor, Tensor] | None
    k_cache: Tensor
    v_cache: Tensor
    batch: StepBatch
    table: AdapterTable | None

    def run(self, layer: DecoderLayer) -> tuple[Tensor, Tensor, Tensor]:
        """The output and the caches after it, NaN as 0; the case itself stays as it is."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        out = layer(self.x, self.rotary, k_cache, v_cache, self.batch, self.table)
        return out, k_cache.nan_to_num(), v_cache.nan_to_num()


def random(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def make_parts(
    backend: CpuBackend,
    dtype: torch.dtype,
    *,
    head_norms: bool = False,
    bias: bool = False,
    intermediate: int = INTERMEDIATE,
):
    def linear(in_features: int, out_features: int, seed: int) -> Linear:
        weight = random(out_features, in_features, dtype=dtype, seed=seed, scale=in_features**-0.5)
        return backend.linear(
            weight, random(out_features, dtype=dtype, seed=seed + 10) if bias else None, keep_weight=False
        )

    def norm(size: int, seed: int) -> Norm:
        return Norm(1 + random(size, dtype=dtype, seed=seed, scale=0.2), 1e-5 * seed)

    return DecoderLayerParts(
        qkv=linear(HIDDEN, QKV, 1),
        output=linear(HEADS * HEAD_DIM, HIDDEN, 2),
        gate_up=linear(HIDDEN, 2 * intermediate, 3),
        down=linear(intermediate, HIDDEN, 4),
        lora_groups=GROUPS,
        input_norm=norm(HIDDEN, 5),
        mlp_norm=norm(HIDDEN, 6),
        q_norm=norm(HEAD_DIM, 7) if head_norms else None,
        k_norm=norm(HEAD_DIM, 8) if head_norms else None,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=intermediate,
        scaling=HEAD_DIM**-0.5,
        sliding_window=None,
        softcap=None,
    )


def make_table(dtype: torch.dtype) -> AdapterTable:
    """An adapter of each rank on all linears; the last one's o_proj is absent."""
    pieces: list[Tensor] = []
    offset_a = torch.zeros(len(RANKS), len(GROUPS), dtype=torch.int64)
    offset_b = torch.zeros(len(RANKS), 7, dtype=torch.int64)
    lora_rank = torch.zeros(len(RANKS), 7, dtype=torch.int32)

    def append(rows: int, columns: int, seed: int) -> int:
        offset = sum(piece.numel() for piece in pieces)
        pieces.append(random(rows * columns, dtype=dtype, seed=seed, scale=rows**-0.25 * 0.2))
        return offset

    for slot, rank in enumerate(RANKS):
        for group in GROUPS:
            if (slot, group.group_index) == (2, 1):
                continue
            members = range(group.member_start, group.member_start + len(group.out_features))
            offset_a[slot, group.group_index] = append(rank * len(members), group.in_features, slot * 10)
            for member, columns in zip(members, group.out_features, strict=True):
                lora_rank[slot, member] = rank
                offset_b[slot, member] = append(rank, columns, slot * 10 + member)
    scaling = torch.linspace(0.5, 2, offset_b.numel()).view(offset_b.shape)
    return AdapterTable(torch.cat(pieces), offset_a, offset_b, lora_rank, scaling)


def make_case(name: str, dtype: torch.dtype, *, with_adapters: bool = True, with_rotary: bool = True) -> Case:
    context_lens, num_rows = CASES[name]
    inputs = make_attention_inputs(context_lens, num_rows, HEADS, KV_HEADS, HEAD_DIM, dtype=dtype)
    batch, total = inputs.batch, sum(num_rows)
    angles = torch.rand(total, HEAD_DIM // 2, generator=torch.Generator().manual_seed(3)) * 6
    rotary = torch.cat([angles, angles], dim=-1)
    if with_adapters:
        edges = sorted({0, total // 3, total // 2, total})
        slots = [2, -1, 0][: len(edges) - 1]
        segments = Segments(
            torch.tensor(edges, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32), has_adapter=True
        )
        batch = replace(batch, segments=segments)
    return Case(
        x=random(total, HIDDEN, dtype=dtype, seed=9),
        rotary=(rotary.cos().to(dtype)[None], rotary.sin().to(dtype)[None]) if with_rotary else None,
        k_cache=inputs.k_cache,
        v_cache=inputs.v_cache,
        batch=batch,
        table=make_table(dtype) if with_adapters else None,
    )


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def cpu(cpu_library) -> CpuBackend:
    return CpuBackend(cpu_library)


def fused(backend: CpuBackend, parts: DecoderLayerParts) -> DecoderLayer:
    layer = backend.decoder_layer(parts)
    if layer is None:
        pytest.skip("this CPU has no packed linears")
    return layer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_adapters", [False, True], ids=["base", "adapters"])
def test_gives_the_bits_of_the_separate_ops(cpu, dtype, name, with_adapters):
    parts = make_parts(cpu, dtype)
    case = make_case(name, dtype, with_adapters=with_adapters)
    for found, expected in zip(case.run(fused(cpu, parts)), case.run(ComposedDecoderLayer(parts, cpu)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("variant", ["head norms", "bias", "no rotary", "window", "softcap"])
def test_gives_them_for_every_part_a_family_may_have(cpu, dtype, variant):
    parts = make_parts(cpu, dtype, head_norms=variant == "head norms", bias=variant == "bias")
    parts = replace(parts, sliding_window=20 if variant == "window" else None)
    parts = replace(parts, softcap=2.0 if variant == "softcap" else None)
    case = make_case("mixed", dtype, with_rotary=variant != "no rotary")
    for found, expected in zip(case.run(fused(cpu, parts)), case.run(ComposedDecoderLayer(parts, cpu)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_adapters", [False, True], ids=["base", "adapters"])
def test_layers_as_one_op_give_the_bits_of_one_after_the_other(cpu, dtype, name, with_adapters):
    """Layers of different parts."""
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
    for _ in range(2):  # into the same slots: no state is left from the first time
        assert torch.equal(together(case.x, case.rotary, k_caches, v_caches, case.batch, case.table), rows)
    for found, expected in zip(at_once, one_by_one, strict=True):
        for cache, expected_cache in zip(found, expected, strict=True):
            assert torch.equal(cache.nan_to_num(), expected_cache.nan_to_num())


def test_no_layer_of_several_changes_anything_when_an_index_is_out_of_range(cpu, dtype):
    case = make_case("decode", dtype)
    assert case.table is not None
    layers = cpu.decoder_layers([fused(cpu, make_parts(cpu, dtype)), fused(cpu, make_parts(cpu, dtype))])
    assert layers is not None
    whole, short = case.k_cache.clone(), case.k_cache[:1].clone()
    with pytest.raises(ValueError, match=r"block|slot"):
        layers(case.x, case.rotary, (whole, short), (whole.clone(), short.clone()), case.batch, case.table)
    assert torch.equal(whole.nan_to_num(), case.k_cache.nan_to_num())


def test_layers_of_other_backends_or_shapes_are_not_one_op(cpu):
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


def test_changes_nothing_when_an_index_is_out_of_range(cpu, dtype):
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


def test_refuses_tensors_that_do_not_fit(cpu, dtype):
    layer = fused(cpu, make_parts(cpu, dtype))
    case = make_case("decode", dtype)
    for change, match in (
        ({"x": case.x[:, :-1]}, "x is"),
        ({"x": case.x[:-1]}, "x is"),
        ({"x": case.x.half()}, "x.dtype"),
        ({"k_cache": case.k_cache[:, :1]}, "k_cache"),
        ({"rotary": (case.x, case.x)}, "cos"),
    ):
        with pytest.raises(ValueError, match=match):
            replace(case, **change).run(layer)


def test_other_linears_get_no_fused_layer(cpu):
    parts = make_parts(cpu, torch.float16)
    assert cpu.decoder_layer(parts) is None

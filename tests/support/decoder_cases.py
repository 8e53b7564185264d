"""Decoder layers and batches for them, small enough to be compared bit by bit."""

from dataclasses import dataclass, replace

import torch
from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.decoder_layer import DecoderLayer, DecoderLayerParts, Norm
from loraserve_kernels.linear import Linear
from loraserve_kernels.lora_add import add_magnitude
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
NUM_LOGITS = 4203
HEAD_GROUP = LoraGroup(4, 7, HIDDEN, (NUM_LOGITS,))
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
        """The output and the caches after it, whose NaN are 0; leaves the case itself unchanged."""
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

    gate_up, down = GROUPS[2:]
    gate_up, down = replace(gate_up, out_features=(intermediate,) * 2), replace(down, in_features=intermediate)
    return DecoderLayerParts(
        qkv=linear(HIDDEN, QKV, 1),
        output=linear(HEADS * HEAD_DIM, HIDDEN, 2),
        gate_up=linear(HIDDEN, 2 * intermediate, 3),
        down=linear(intermediate, HIDDEN, 4),
        lora_groups=(*GROUPS[:2], gate_up, down),
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
    """One adapter of each rank on all linears, except that the last one lacks o_proj and the first one lm_head."""
    pieces: list[Tensor] = []
    offset_a = torch.zeros(len(RANKS), 5, dtype=torch.int64)
    offset_b = torch.zeros(len(RANKS), 8, dtype=torch.int64)
    lora_rank = torch.zeros(len(RANKS), 8, dtype=torch.int32)

    def append(rows: int, columns: int, seed: int) -> int:
        offset = sum(piece.numel() for piece in pieces)
        pieces.append(random(rows * columns, dtype=dtype, seed=seed, scale=rows**-0.25 * 0.2))
        return offset

    for slot, rank in enumerate(RANKS):
        for group in (*GROUPS, HEAD_GROUP):
            if (slot, group.group_index) in ((2, 1), (0, 4)):
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


def add_dora(table: AdapterTable, slots: tuple[int, ...], every: int = 1) -> None:
    """Adds DoRA to those members of each adapter whose index is a multiple of `every`."""
    for slot in slots:
        for group in (*GROUPS, HEAD_GROUP):
            for member, out_features in enumerate(group.out_features, start=group.member_start):
                if table.lora_rank[slot, member] and member % every == 0:
                    add_magnitude(table, slot, member, out_features)


DORA = {"all": ((0, 2), 1), "one of two adapters": ((2,), 1), "some members": ((0, 2), 2)}
"""(slots of the adapters with DoRA, `every` as in `add_dora`)."""

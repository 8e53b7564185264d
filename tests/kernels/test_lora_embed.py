import pytest
import torch
from loraserve_kernels.lora_add import LoraInputs, make_lora_inputs, matrix

BASE = -1
EMBED_SCALE = 1.75


def expected_output(lora: LoraInputs, token_ids: torch.Tensor, embed_scale: float = EMBED_SCALE) -> torch.Tensor:
    """float64: y after the op."""
    table, group = lora.table, lora.group
    expected, member = lora.y.double(), group.member_start
    starts = lora.segments.start.tolist()
    for slot, first, end in zip(lora.segments.adapter_slot.tolist(), starts[:-1], starts[1:], strict=True):
        rank = int(table.lora_rank[slot, member]) if slot != BASE else 0
        if rank:
            a = matrix(table, int(table.offset_a[slot, group.group_index]), rank, group.in_features).double()
            b = matrix(table, int(table.offset_b[slot, member]), rank, lora.y.shape[1]).double()
            one_hot = torch.nn.functional.one_hot(token_ids[first:end], group.in_features).double()
            expected[first:end] += embed_scale * float(table.scaling[slot, member]) * (one_hot @ a.T @ b)
    return expected


def make_token_ids(lora: LoraInputs) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(lora.group.in_features, lora.y.shape[:1], generator=generator).to(lora.y.device)


@pytest.mark.parametrize(
    ("rows", "slots", "ranks", "num_embeddings", "hidden_size"),
    [
        pytest.param([1], [0], [1], 1, 1, id="smallest"),
        pytest.param([2, 3], [0, 1], [512, 3], 70, 257, id="rank-512"),
        pytest.param([2, 1, 37, 4], [BASE, 0, 1, 2], [33, 16, 8], 301, 130, id="mixed-ranks"),
        pytest.param([4, 0, 3, 0], [BASE, 0, 1, 2], [4, 5, 6], 9, 48, id="empty-segments"),
        pytest.param([3, 3], [0, 1], [9, 0], 24, 40, id="absent"),
        pytest.param([100, 1, 40], [0, BASE, 1], [20, 7], 99, 150, id="more-rows"),
        pytest.param([515, 1, 5], [0, BASE, 1], [20, 7], 99, 33, id="prefill"),
        pytest.param([0], [0], [3], 9, 16, id="no-rows"),
    ],
)
def test_adds_the_product_of_each_rows_token_and_adapter(
    backend, device, dtype, assert_close, rows, slots, ranks, num_embeddings, hidden_size
):
    slot_ranks = [(rank,) for rank in ranks]
    lora = make_lora_inputs(rows, slots, slot_ranks, num_embeddings, (hidden_size,), dtype, device)
    token_ids, untouched = make_token_ids(lora), lora.y.clone()
    expected = expected_output(lora, token_ids)
    backend.lora_embed(lora.y, token_ids, EMBED_SCALE, lora.group, lora.table, lora.segments)
    assert_close(lora.y, expected)
    first = 0
    for slot, count in zip(slots, rows, strict=True):
        if slot == BASE or not ranks[slot]:
            assert torch.equal(lora.y[first : first + count], untouched[first : first + count])
        first += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_tolerance_catches_another_token_and_a_missing_scale(backend, device, dtype, assert_close):
    lora = make_lora_inputs([5, 4], [0, 1], [(8,), (3,)], 40, (64,), dtype, device)
    token_ids = make_token_ids(lora)
    wrong_tokens, unscaled = expected_output(lora, token_ids.roll(1)), expected_output(lora, token_ids, 1.0)
    backend.lora_embed(lora.y, token_ids, EMBED_SCALE, lora.group, lora.table, lora.segments)
    for wrong in (wrong_tokens, unscaled):
        with pytest.raises(AssertionError):
            assert_close(lora.y, wrong)


def test_refuses_token_ids_of_another_length_or_dtype(backend, device):
    lora = make_lora_inputs([3], [0], [(2,)], 8, (16,), device=device)
    token_ids = make_token_ids(lora)
    for wrong, message in ((token_ids[:-1], "token_ids is"), (token_ids.int(), "token_ids")):
        with pytest.raises(ValueError, match=message):
            backend.lora_embed(lora.y, wrong, EMBED_SCALE, lora.group, lora.table, lora.segments)


@pytest.mark.parametrize("token_id", [-1, 40, 1 << 40])
def test_a_token_outside_the_embedding_changes_nothing(cpu, token_id):
    lora = make_lora_inputs([5, 4], [0, 1], [(8,), (3,)], 40, (64,), torch.float32, "cpu")
    token_ids, untouched = make_token_ids(lora), lora.y.clone()
    token_ids[7] = token_id
    with pytest.raises(ValueError, match="token"):
        cpu.lora_embed(lora.y, token_ids, EMBED_SCALE, lora.group, lora.table, lora.segments)
    assert torch.equal(lora.y, untouched)

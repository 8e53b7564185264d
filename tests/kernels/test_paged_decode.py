import dataclasses

import numpy as np
import pytest
import torch
from loraserve_kernels.attention_work import APPEND_ROWS, AttentionWork, fill_append_splits, fill_decode_splits
from loraserve_kernels.paged_attention import AttentionInputs, make_attention_inputs, paged_attention_reference
from torch import Tensor


@pytest.fixture
def attend(triton_device):
    from loraserve_kernels.triton_ops.paged_attention import paged_attention

    def attend(inputs: AttentionInputs, **options) -> Tensor:
        return paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, **options)

    return attend


def expected(inputs: AttentionInputs, **options) -> Tensor:
    """The reference in float64; the contract suite compares it with one row and one head at a time."""
    caches = inputs.k_cache.double(), inputs.v_cache.double()
    return paged_attention_reference(inputs.q.double(), *caches, inputs.batch, **options)


def use_work(inputs: AttentionInputs, num_splits: int, num_append_splits: int = 0) -> None:
    """Give the batch lists of these lengths, filled for its current values."""
    lens, rows = inputs.batch.context_lens.cpu().numpy(), inputs.batch.num_rows.cpu().numpy()
    decode, append = np.empty((num_splits, 4), np.int32), np.empty((num_append_splits, 4), np.int32)
    fill_decode_splits(decode, lens, rows, num_splits)
    fill_append_splits(append, lens, rows, num_append_splits)
    lists = (torch.from_numpy(array).to(inputs.q.device) for array in (decode, append, np.empty((0, 3), np.int32)))
    inputs.batch.attention = AttentionWork(*lists)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])


@pytest.mark.parametrize(
    ("contexts", "heads", "kv_heads", "head_dim", "block_size", "options"),
    [
        pytest.param([1, 2300, 129], 1, 1, 16, 16, {}, id="one-head"),
        pytest.param([700, 16, 17], 3, 1, 80, 32, {"softcap": 3.0}, id="three-per-kv-head-80"),
        pytest.param([300, 1, 65], 8, 2, 128, 16, {"sinks": True}, id="four-per-kv-head-128"),
        pytest.param([257, 600], 8, 1, 64, 16, {"sliding_window": 128, "sinks": True}, id="eight-per-kv-head"),
        pytest.param([90, 31], 2, 1, 256, 32, {"sliding_window": 50, "softcap": 4.0}, id="256"),
        pytest.param([150, 77], 2, 1, 96, 24, {"sliding_window": 1}, id="96-blocks-of-24"),
    ],
)
@DTYPES
def test_decodes_ragged_contexts(
    attend, triton_device, assert_close, dtype, contexts, heads, kv_heads, head_dim, block_size, options
):
    ones = [1] * len(contexts)
    inputs = make_attention_inputs(contexts, ones, heads, kv_heads, head_dim, block_size, dtype, triton_device)
    options = {"scaling": head_dim**-0.5, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 3, heads).to(triton_device, dtype)
    assert_close(attend(inputs, **options), expected(inputs, **options))


def test_decodes_contexts_of_one_token_and_of_131072(attend, triton_device, assert_close):
    inputs = make_attention_inputs([1, 131_072], [1, 1], 1, 1, 16, device=triton_device)
    assert_close(attend(inputs, scaling=0.25), expected(inputs, scaling=0.25))


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 150}, {"sinks": True}, {"sliding_window": 40, "softcap": 2.0, "sinks": True}]
)
@pytest.mark.parametrize("num_splits", [2, 5, 12])
def test_the_number_of_parts_does_not_change_the_result(attend, triton_device, assert_close, num_splits, options):
    inputs = make_attention_inputs([900, 300], [1, 1], 4, 2, 32, device=triton_device)
    options = {"scaling": 0.3, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(0, 4, 4, device=triton_device)
    use_work(inputs, num_splits)
    assert_close(attend(inputs, **options), expected(inputs, **options))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 37}, {"sinks": True}])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_splits"), [(2, 2, 4), (4, 2, 7), pytest.param(5, 1, 5, id="several-query-tiles")]
)
def test_a_few_rows_of_a_long_context_share_its_parts(
    attend, triton_device, assert_close, heads, kv_heads, num_splits, options
):
    inputs = make_attention_inputs([500, 6, 150], [2, 6, 19], heads, kv_heads, 16, device=triton_device)
    options = {"scaling": 0.3, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(0, 4, heads, device=triton_device)
    use_work(inputs, 0, num_splits)
    assert_close(attend(inputs, **options), expected(inputs, **options))


def test_merges_more_parts_than_a_merging_program_loads_at_once(attend, triton_device, assert_close):
    inputs = make_attention_inputs([2100], [1], 1, 1, 256, dtype=torch.float16, device=triton_device)
    use_work(inputs, 17)
    assert inputs.batch.attention.decode_splits[:, 3].tolist() == [17] * 17
    assert_close(attend(inputs, scaling=0.1), expected(inputs, scaling=0.1))


def test_a_work_list_stays_valid_while_contexts_grow(attend, triton_device, assert_close):
    inputs = make_attention_inputs([700, 50], [1, 1], 2, 1, 32, device=triton_device)
    shorter = torch.tensor([130, 1], dtype=torch.int32, device=triton_device)
    longer, inputs.batch.context_lens = inputs.batch.context_lens, shorter
    use_work(inputs, 5)
    for context_lens in (shorter, longer):
        inputs.batch.context_lens = context_lens
        assert_close(attend(inputs, scaling=0.3), expected(inputs, scaling=0.3))


def test_a_second_launch_uses_new_values_in_the_same_tensors(attend, triton_device, assert_close):
    """As a captured CUDA graph does: same shapes and list lengths, other sequences, lengths and numbers of parts."""
    first = make_attention_inputs([600, 40, 1], [1, 1, 1], 4, 2, 32, device=triton_device)
    second = make_attention_inputs([33, 608, 16], [1, 1, 1], 4, 2, 32, device=triton_device, seed=1)
    use_work(first, 9)
    use_work(second, 9)
    assert_close(attend(first, scaling=0.3), expected(first, scaling=0.3))
    copy_into(first, second)
    assert_close(attend(first, scaling=0.3), expected(second, scaling=0.3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_serves_other_contexts(attend, assert_close):
    first = make_attention_inputs([600, 40, 1], [1, 1, 1], 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    second = make_attention_inputs([33, 608, 16], [1, 1, 1], 8, 2, 128, dtype=torch.bfloat16, device="cuda", seed=1)
    use_work(first, 9)
    use_work(second, 9)
    attend(first, scaling=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(first, scaling=0.1)
    copy_into(first, second)
    graph.replay()
    assert_close(out, expected(second, scaling=0.1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_refuses_to_make_lists_during_a_graph_capture(attend, monkeypatch):
    inputs = make_attention_inputs([20], [1], 2, 1, 16, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="attention is None"):
        attend(inputs, scaling=0.3)


def copy_into(inputs: AttentionInputs, others: AttentionInputs) -> None:
    for name in ("q", "k_cache", "v_cache"):
        getattr(inputs, name).copy_(getattr(others, name))
    for name in ("block_table", "context_lens", "row_start", "num_rows"):
        getattr(inputs.batch, name).copy_(getattr(others.batch, name))
    for name in ("decode_splits", "append_splits", "prefill_tiles"):
        getattr(inputs.batch.attention, name).copy_(getattr(others.batch.attention, name))


def test_paged_decode_writes_only_its_own_rows(triton_device):
    from loraserve_kernels.triton_ops.attention_tile import Scores
    from loraserve_kernels.triton_ops.paged_decode import paged_decode

    inputs = make_attention_inputs([300, 40, 9], [1, 20, 0], 2, 1, 16, device=triton_device)
    use_work(inputs, 5, 2)
    out = torch.full(inputs.q.shape, 7.0, device=triton_device)
    arguments = (out, inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, inputs.batch.attention.decode_splits)
    paged_decode(*arguments, 1, scores=Scores(0.3, None), sliding_window=None, sinks=None)
    assert (out[:20] == 7.0).all()
    assert (out[20] != 7.0).all()


def test_few_programs_merge_the_rows_of_a_tile(attend, triton_device, launches):
    from loraserve_kernels.triton_ops import paged_decode

    inputs = make_attention_inputs([500, 300], [1, 16], 2, 1, 16, device=triton_device)
    use_work(inputs, 5, 3)
    attend(inputs, scaling=0.3)
    work = inputs.batch.attention
    assert [grid for name, grid in launches if name == "_merge_kernel"] == [
        (len(work.decode_splits), 2, 1),
        (len(work.append_splits), 2, paged_decode.MERGE_ROW_PROGRAMS),
    ]
    assert paged_decode.MERGE_ROW_PROGRAMS < APPEND_ROWS


def test_two_runs_give_the_same_bits(attend, triton_device):
    inputs = make_attention_inputs([500, 40], [1, 3], 2, 1, 16, device=triton_device)
    assert torch.equal(attend(inputs, scaling=0.3), attend(inputs, scaling=0.3))


def test_the_tolerance_catches_an_omitted_part(attend, triton_device, assert_close):
    inputs = make_attention_inputs([900], [1], 2, 1, 32, dtype=torch.float16, device=triton_device)
    use_work(inputs, 8)
    correct = expected(inputs, scaling=0.3)
    assert_close(attend(inputs, scaling=0.3), correct)
    inputs.batch.attention.decode_splits[0, 3] -= 1  # the first part reaches into the second, the last is not merged
    with pytest.raises(AssertionError):
        assert_close(attend(inputs, scaling=0.3), correct)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries.long(), "attention.decode_splits.dtype is torch.int64"),
        (lambda entries: entries[:, :3].contiguous(), r"attention.decode_splits is \[3, 3\]"),
    ],
)
def test_refuses_lists_of_another_shape_or_dtype(attend, triton_device, change, message):
    inputs = make_attention_inputs([20], [1], 2, 1, 16, device=triton_device)
    use_work(inputs, 3)
    work = inputs.batch.attention
    inputs.batch.attention = dataclasses.replace(work, decode_splits=change(work.decode_splits))
    with pytest.raises(ValueError, match=message):
        attend(inputs, scaling=0.3)


def test_refuses_a_scaling_that_is_not_positive(attend, triton_device):
    inputs = make_attention_inputs([20], [1], 2, 1, 16, device=triton_device)
    with pytest.raises(ValueError, match=r"scaling is 0.0, expected above 0"):
        attend(inputs, scaling=0.0)

import dataclasses

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.paged_attention import AttentionInputs, make_attention_inputs
from torch import Tensor


def expected_output(inputs: AttentionInputs, scaling, sliding_window=None, softcap=None, sinks=None) -> Tensor:
    """Softmax over the visible keys in float64, one row and one head at a time."""
    batch, out = inputs.batch, torch.zeros(inputs.q.shape, dtype=torch.float64, device=inputs.q.device)
    for k, v, first, count in zip(
        inputs.keys, inputs.values, batch.row_start.tolist(), batch.num_rows.tolist(), strict=True
    ):
        group = inputs.q.shape[1] // k.shape[1]
        for row in range(count):
            position = k.shape[0] - count + row
            visible = slice(max(0, position - sliding_window + 1) if sliding_window else 0, position + 1)
            for head in range(inputs.q.shape[1]):
                scores = k[visible, head // group].double() @ inputs.q[first + row, head].double() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    weights = torch.cat([scores, sinks[head : head + 1].double()]).softmax(0)[:-1]
                else:
                    weights = scores.softmax(0)
                out[first + row, head] = weights @ v[visible, head // group].double()
    return out


def run(backend, inputs: AttentionInputs, **options) -> Tensor:
    return backend.paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, **options)


OPTIONS = [
    pytest.param({}, id="causal"),
    pytest.param({"sliding_window": 1}, id="window-1"),
    pytest.param({"sliding_window": 21}, id="window-21"),
    pytest.param({"softcap": 2.5}, id="softcap"),
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"sliding_window": 70, "softcap": 5.0, "sinks": True}, id="all"),
]

SHAPES = [
    # context_lens, num_rows, num_heads, num_kv_heads, head_dim, block_size
    pytest.param([1], [1], 1, 1, 8, 16, id="first-token"),
    pytest.param([5, 40, 130, 1], [1, 33, 2, 1], 6, 2, 40, 16, id="mixed"),
    pytest.param([70, 3], [70, 3], 4, 4, 64, 16, id="prefill"),
    pytest.param([65, 64, 63, 128], [1, 1, 1, 1], 8, 1, 128, 32, id="decode-mqa"),
    pytest.param([65, 64, 30, 128, 3], [1, 1, 2, 1, 1], 6, 2, 64, 16, id="decode-gqa"),
    pytest.param([90, 20, 4], [1, 3, 4], 2, 2, 96, 32, id="decode-mha"),
    pytest.param([90], [7], 3, 3, 33, 7, id="odd"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("contexts", "rows", "heads", "kv_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_attends_to_the_visible_context(
    backend, device, dtype, assert_close, contexts, rows, heads, kv_heads, head_dim, block_size, options
):
    inputs = make_attention_inputs(contexts, rows, heads, kv_heads, head_dim, block_size, dtype, device)
    options = {"scaling": head_dim**-0.5, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 3, heads).to(device, dtype)
    assert_close(run(backend, inputs, **options), expected_output(inputs, **options))


def test_attends_in_float16(backend, device, assert_close):
    inputs = make_attention_inputs([9, 20], [1, 20], 4, 2, 16, dtype=torch.float16, device=device)
    assert_close(run(backend, inputs, scaling=0.25), expected_output(inputs, 0.25))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 900}])
@pytest.mark.parametrize("heads", [2, 20])
def test_attends_to_contexts_long_enough_to_be_split_between_threads(backend, device, assert_close, heads, options):
    inputs = make_attention_inputs([1500, 40], [1, 1], heads, 1, 16, device=device)
    assert_close(run(backend, inputs, scaling=0.3, **options), expected_output(inputs, 0.3, **options))


def test_attends_with_more_query_heads_per_kv_head_than_fit_a_tile(backend, device, assert_close):
    inputs = make_attention_inputs([20, 6], [3, 1], 71, 1, 16, device=device)
    assert_close(run(backend, inputs, scaling=0.25), expected_output(inputs, 0.25))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_attends_with_scores_outside_the_range_of_exp(backend, device, dtype, assert_close):
    inputs = make_attention_inputs([150], [40], 2, 1, 32, dtype=dtype, device=device)
    assert_close(run(backend, inputs, scaling=40.0), expected_output(inputs, 40.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_values_after_the_context_and_before_the_window_have_no_effect(backend, device, dtype):
    inputs = make_attention_inputs([200, 77], [1, 30], 4, 2, 32, dtype=dtype, device=device)
    clean = run(backend, inputs, scaling=0.2, sliding_window=16)
    table = inputs.batch.block_table
    for sequence, first_visible in ((0, 200 - 16), (1, 77 - 30 + 1 - 16)):
        for position in range(first_visible):
            block = int(table[sequence, position // 16])
            for cache in (inputs.k_cache, inputs.v_cache):
                cache[block, :, position % 16] = float("nan")
    table[0, : (200 - 16) // 16] = 1 << 30
    assert not clean.isnan().any()
    assert torch.equal(run(backend, inputs, scaling=0.2, sliding_window=16), clean)


def test_sequences_without_rows_are_skipped(backend, device, assert_close):
    inputs = make_attention_inputs([10, 20, 5], [1, 0, 2], 2, 2, 16, device=device)
    assert_close(run(backend, inputs, scaling=0.25), expected_output(inputs, 0.25))


def test_a_batch_without_rows_returns_an_empty_tensor(backend, device):
    inputs = make_attention_inputs([10], [0], 2, 2, 16, device=device)
    assert run(backend, inputs, scaling=0.25).shape == (0, 2, 16)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 3.0}])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 40), (6, 2, 64), (2, 2, 96), (20, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_rows_bits_do_not_depend_on_batch_chunks_or_threads(library, dtype, heads, kv_heads, head_dim, options):
    backend, context = CpuBackend(library), 700
    inputs = make_attention_inputs([context, 30], [context, 1], heads, kv_heads, head_dim, dtype=dtype)
    whole = run(backend, inputs, scaling=0.2, **options)[1:]
    q = inputs.q[1:]
    threads = torch.get_num_threads()
    try:
        for chunk, num_threads in ((1, 2), (1, 1), (64, 2), (333, 1)):
            torch.set_num_threads(num_threads)
            for first in range(0, context, chunk) if chunk > 1 else (0, 5, 600, 699):
                count = min(chunk, context - first)
                batch = dataclasses.replace(
                    inputs.batch,
                    block_table=inputs.batch.block_table[:1],
                    context_lens=torch.tensor([first + count], dtype=torch.int32),
                    row_start=torch.tensor([0], dtype=torch.int32),
                    num_rows=torch.tensor([count], dtype=torch.int32),
                )
                part = dataclasses.replace(inputs, q=q[first : first + count], batch=batch)
                assert torch.equal(run(backend, part, scaling=0.2, **options), whole[first : first + count])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 21}, {"softcap": 3.0}])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(2, 2, 64, 16), (4, 2, 32, 48), (6, 2, 96, 16), (4, 1, 128, 32)]
)
def test_a_row_of_a_prompt_has_the_same_bits_as_a_decode_row(library, heads, kv_heads, head_dim, block_size, options):
    backend, context = CpuBackend(library), 150
    inputs = make_attention_inputs([context], [context], heads, kv_heads, head_dim, block_size, torch.bfloat16)
    decode = dataclasses.replace(
        inputs.batch,
        block_table=inputs.batch.block_table.repeat(context, 1),
        context_lens=torch.arange(1, context + 1, dtype=torch.int32),
        row_start=torch.arange(context, dtype=torch.int32),
        num_rows=torch.ones(context, dtype=torch.int32),
    )
    prompt = run(backend, inputs, scaling=0.2, **options)
    assert torch.equal(run(backend, dataclasses.replace(inputs, batch=decode), scaling=0.2, **options), prompt)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_the_tolerance_catches_an_off_by_one_window(backend, device, dtype, assert_close):
    inputs = make_attention_inputs([40], [4], 2, 1, 16, dtype=dtype, device=device)
    with pytest.raises(AssertionError):
        assert_close(run(backend, inputs, scaling=0.25, sliding_window=20), expected_output(inputs, 0.25, 19))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"q": i.q[:, :3]}, "q is"),
        (lambda i: {"q": i.q[..., :8]}, "q is"),
        (lambda i: {"q": i.q.bfloat16()}, "q.dtype"),
        (lambda i: {"v_cache": i.v_cache[:1]}, "v_cache is"),
        (lambda i: {"k_cache": i.k_cache.transpose(1, 2).contiguous().transpose(1, 2)}, "strided"),
        (lambda i: {"batch": dataclasses.replace(i.batch, num_rows=i.batch.num_rows.long())}, "num_rows.dtype"),
        (lambda i: {"batch": dataclasses.replace(i.batch, num_rows=i.batch.num_rows[1:])}, "num_rows is"),
        (lambda i: {"batch": dataclasses.replace(i.batch, row_start=i.batch.row_start[1:])}, "row_start is"),
        (lambda i: {"batch": dataclasses.replace(i.batch, context_lens=i.batch.context_lens[1:])}, "context_lens is"),
        (lambda i: {"batch": dataclasses.replace(i.batch, block_table=i.batch.block_table[0])}, "block_table is"),
    ],
)
def test_refuses_wrong_shapes_dtypes_and_strides(backend, device, change, message):
    inputs = make_attention_inputs([5], [2], 4, 2, 16, device=device)
    with pytest.raises(ValueError, match=message):
        run(backend, dataclasses.replace(inputs, **change(inputs)), scaling=0.25)


@pytest.mark.parametrize("options", [{"sliding_window": 0}, {"softcap": 0.0}, {"sinks": torch.zeros(3)}])
def test_refuses_options_out_of_range(backend, device, options):
    inputs = make_attention_inputs([5], [2], 4, 2, 16, device=device)
    with pytest.raises(ValueError, match=next(iter(options))):
        run(backend, inputs, scaling=0.25, **options)


def test_c_refuses_blocks_and_rows_outside_the_buffers(cpu_library):
    backend = CpuBackend(cpu_library)
    inputs = make_attention_inputs([20], [2], 4, 2, 16)
    inputs.batch.block_table[0, 1] = inputs.k_cache.shape[0]
    with pytest.raises(ValueError, match="block_table"):
        run(backend, inputs, scaling=0.25)
    inputs = make_attention_inputs([20], [2], 4, 2, 16)
    inputs.batch.row_start[0] = 1
    with pytest.raises(ValueError, match="row ranges"):
        run(backend, inputs, scaling=0.25)

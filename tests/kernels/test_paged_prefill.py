import dataclasses
from types import SimpleNamespace

import pytest
import torch
from loraserve_kernels import attention_work
from loraserve_kernels.attention_work import AttentionWork, make_attention_work
from loraserve_kernels.backend import KernelTooLargeError
from loraserve_kernels.paged_attention import AttentionInputs, make_attention_inputs, paged_attention_reference
from torch import Tensor


@pytest.fixture(autouse=True)
def prefills_few_rows_too(monkeypatch):
    """The interpreter is too slow for more rows."""
    monkeypatch.setattr(attention_work, "FEW_ROWS", 0)


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


def use_work(inputs: AttentionInputs, num_spare: int = 0) -> None:
    """Give the batch its lists, with unused entries at their ends."""
    work = make_attention_work(inputs.batch.context_lens, inputs.batch.num_rows, num_splits=3)
    lists = (work.decode_splits, work.append_splits, work.prefill_tiles)
    inputs.batch.attention = AttentionWork(
        *(torch.cat([entries, entries.new_full((num_spare, entries.shape[1]), -1)]) for entries in lists)
    )


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])


@pytest.mark.parametrize(
    ("contexts", "rows", "heads", "kv_heads", "head_dim", "block_size", "options"),
    [
        pytest.param([40, 17], [40, 17], 2, 2, 16, 16, {}, id="whole-prompts"),
        pytest.param([1100], [30], 2, 1, 64, 16, {}, id="long-prefix"),
        pytest.param([300, 130], [129, 128], 3, 1, 16, 16, {}, id="several-tiles-three-per-kv-head"),
        pytest.param([200], [60], 8, 1, 80, 32, {"softcap": 3.0}, id="eight-per-kv-head-80"),
        pytest.param([90, 30], [40, 18], 4, 1, 128, 16, {"sinks": True}, id="four-per-kv-head-128"),
        pytest.param([100], [33], 2, 1, 256, 32, {"sliding_window": 30}, id="256"),
        pytest.param([150], [150], 2, 1, 32, 16, {"sliding_window": 5, "sinks": True}, id="narrow-window"),
        pytest.param([500], [90], 2, 1, 96, 24, {"sliding_window": 300, "softcap": 4.0}, id="wide-window-blocks-of-24"),
        pytest.param([600], [20], 1, 1, 64, 16, {"sliding_window": 400, "sinks": True}, id="window-of-whole-tiles"),
    ],
)
@DTYPES
def test_prefills_ragged_batches(
    attend, triton_device, assert_close, dtype, contexts, rows, heads, kv_heads, head_dim, block_size, options
):
    inputs = make_attention_inputs(contexts, rows, heads, kv_heads, head_dim, block_size, dtype, triton_device)
    options = {"scaling": head_dim**-0.5, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 3, heads).to(triton_device, dtype)
    assert_close(attend(inputs, **options), expected(inputs, **options))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 60, "softcap": 3.0, "sinks": True}])
def test_prefills_appends_and_decodes_in_one_batch(attend, triton_device, assert_close, options):
    inputs = make_attention_inputs([400, 50, 90, 0, 70], [1, 50, 16, 0, 17], 4, 2, 16, device=triton_device)
    options = {"scaling": 0.3, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(0, 4, 4, device=triton_device)
    use_work(inputs, num_spare=2)
    assert_close(attend(inputs, **options), expected(inputs, **options))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 70}])
def test_chunks_give_the_same_result_as_the_whole_prompt(attend, triton_device, assert_close, options):
    inputs = make_attention_inputs([330], [330], 2, 1, 32, device=triton_device)
    whole = expected(inputs, scaling=0.3, **options)
    first = 0
    for count in (128, 17, 1, 5, 179):
        lens = torch.tensor([first + count, count], dtype=torch.int32, device=triton_device)
        batch = dataclasses.replace(inputs.batch, context_lens=lens[:1], num_rows=lens[1:])
        part = dataclasses.replace(inputs, q=inputs.q[first : first + count], batch=batch)
        assert_close(attend(part, scaling=0.3, **options), whole[first : first + count])
        first += count
    assert first == 330


def test_a_second_launch_uses_new_values_in_the_same_tensors(attend, triton_device, assert_close):
    """As a captured CUDA graph does: same shapes and list lengths, other sequences, rows and numbers of tiles."""
    first = make_attention_inputs([200, 40], [160, 20], 4, 2, 16, device=triton_device)
    second = make_attention_inputs([33, 208], [30, 150], 4, 2, 16, device=triton_device, seed=1)
    use_work(first)
    use_work(second, num_spare=first.batch.attention.prefill_tiles.shape[0])
    assert_close(attend(first, scaling=0.3), expected(first, scaling=0.3))
    correct = expected(second, scaling=0.3)
    for name in ("q", "k_cache", "v_cache"):
        getattr(first, name).copy_(getattr(second, name))
    for name in ("block_table", "context_lens", "row_start", "num_rows"):
        getattr(first.batch, name).copy_(getattr(second.batch, name))
    tiles = first.batch.attention.prefill_tiles
    tiles.copy_(second.batch.attention.prefill_tiles[: len(tiles)])
    assert_close(attend(first, scaling=0.3), correct)


def test_paged_prefill_writes_only_its_own_rows(triton_device):
    from loraserve_kernels.triton_ops.attention_tile import Scores
    from loraserve_kernels.triton_ops.paged_prefill import paged_prefill

    inputs = make_attention_inputs([30, 40, 9], [1, 20, 9], 2, 1, 16, device=triton_device)
    use_work(inputs, num_spare=1)
    out = torch.full(inputs.q.shape, 7.0, device=triton_device)
    arguments = (out, inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, inputs.batch.attention.prefill_tiles)
    paged_prefill(*arguments, scores=Scores(0.3, None), sliding_window=None, sinks=None)
    assert (out[:9] == 7.0).all()
    assert (out[9:29] != 7.0).all()
    assert (out[29] == 7.0).all()


def test_reads_no_key_before_the_window_of_a_tile(attend, triton_device):
    inputs = make_attention_inputs([300], [60], 2, 1, 16, device=triton_device)
    clean = attend(inputs, scaling=0.3, sliding_window=20)
    hidden = 300 - 60 - 19
    inputs.batch.block_table[0, : hidden // 16] = 1 << 30
    block = int(inputs.batch.block_table[0, hidden // 16])
    for cache in (inputs.k_cache, inputs.v_cache):
        cache[block, :, : hidden % 16] = float("nan")
    assert not clean.isnan().any()
    assert torch.equal(attend(inputs, scaling=0.3, sliding_window=20), clean)


@pytest.mark.parametrize(
    ("head_dim", "shared_kib", "num_queries"),
    [(128, 100, 128), (256, 100, 64), (512, 100, 32), (256, 164, 128), (512, 164, 64), (256, 228, 128)],
)
def test_wide_heads_have_smaller_tiles_on_gpus_with_less_shared_memory(
    triton_device, monkeypatch, head_dim, shared_kib, num_queries
):
    from loraserve_kernels.triton_ops.paged_prefill import max_queries

    properties = SimpleNamespace(shared_memory_per_multiprocessor=shared_kib * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert max_queries(head_dim, torch.device("cuda")) == num_queries


def test_a_kernel_that_does_not_fit_the_gpu_reports_the_lacking_resource(attend, triton_device, monkeypatch):
    from loraserve_kernels.triton_ops import paged_attention
    from triton.runtime.errors import OutOfResources

    def launch(*_, **__):
        raise OutOfResources(133312, 101376, "shared memory")

    monkeypatch.setattr(paged_attention, "paged_prefill", launch)
    inputs = make_attention_inputs([30], [30], 2, 1, 16, device=triton_device)
    message = rf"heads of 16 in float32 does not fit {triton_device}.* \(shared memory: 133312, at most 101376\)"
    with pytest.raises(KernelTooLargeError, match=message):
        attend(inputs, scaling=0.3)


@pytest.mark.parametrize("options", [{"sliding_window": 101}, {"softcap": 8.4}, {"scaling": 0.303}])
def test_the_tolerance_catches_slightly_wrong_options(attend, triton_device, assert_close, options):
    inputs = make_attention_inputs([300], [60], 2, 1, 32, dtype=torch.float16, device=triton_device)
    correct = expected(inputs, scaling=0.3, sliding_window=100, softcap=8.0)
    options = {"scaling": 0.3, "sliding_window": 100, "softcap": 8.0, **options}
    with pytest.raises(AssertionError):
        assert_close(attend(inputs, **options), correct)

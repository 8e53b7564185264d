import gc
import os
import resource
import weakref
from pathlib import Path

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.packed_linear import PackedLinear, packed_bytes
from loraserve_kernels.prepacked_linear import PrepackedLinear, RowMajorLinear
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor

SHAPES = [(1, 1), (7, 5), (33, 100), (70, 64), (2048, 768), (768, 2048)]
NUM_ROWS = [0, 1, 2, 5, 32, 65]
INVARIANT = [
    (kind, dtype)
    for kind in ("packed", "prepacked", "row-major", "row-major-amx")
    for dtype in (torch.float32, torch.bfloat16)
    # With AMX, oneDNN sums some bfloat16 shapes in another order; see `PrepackedLinear`.
    if not (kind == "prepacked" and dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported())
]


def make_weight(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator) * shape[1] ** -0.5
    return weight.to(dtype), torch.randn(shape[0], generator=generator).to(dtype)


def make_linear(kind: str, weight: Tensor, bias: Tensor | None, request: pytest.FixtureRequest):
    if kind == "prepacked":
        return PrepackedLinear(weight, bias)
    if kind == "packed":
        library = request.getfixturevalue("cpu_library")
        if packed_bytes(weight, library) == 0:
            pytest.skip("no packed kernel for this dtype on this CPU")
        return PackedLinear(weight, bias, library)
    libraries = {"row-major": "cpu_library", "row-major-amx": "amx_library"}
    return RowMajorLinear(weight, bias, request.getfixturevalue(libraries[kind]) if kind in libraries else None)


@pytest.fixture(params=["packed", "prepacked", "row-major", "row-major-amx", "no-library"])
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES)
def test_multiplies_by_the_transposed_weight(kind, dtype, assert_close, request, shape, with_bias):
    weight, bias = make_weight(shape, dtype)
    linear = make_linear(kind, weight, bias if with_bias else None, request)
    for num_rows in NUM_ROWS:
        wide = torch.randn(num_rows, shape[1] + 3, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        x = wide[:, 1 : shape[1] + 1]
        expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
        assert_close(linear(x), expected)


def test_keeps_leading_dimensions_and_takes_any_strides(kind, assert_close, request):
    weight, _ = make_weight((12, 10), torch.float32)
    linear = make_linear(kind, weight, None, request)
    for x in (torch.randn(1, 3, 10), torch.randn(1, 1, 10), torch.randn(10), torch.randn(10, 4).T):
        assert_close(linear(x), x.double() @ weight.double().T)


@pytest.mark.parametrize(("kind", "dtype"), INVARIANT, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(kind, dtype, request, shape):
    weight, bias = make_weight(shape, dtype)
    linear = make_linear(kind, weight, bias, request)
    x = torch.randn(64, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = linear(x)
    for num_rows in (1, 2, 3, 7, 11, 16, 33):
        assert torch.equal(torch.cat([linear(part) for part in x.split(num_rows)]), whole)


@pytest.mark.parametrize("shape", [*SHAPES, (80, 40)])
@pytest.mark.parametrize("packed_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_products_of_any_number_of_rows_are_right_and_have_the_same_bits(
    any_library, assert_close, shape, packed_dtype
):
    """Covers pairs of tiles, single and partial tiles, and more rows than a work item has."""
    weight, bias = make_weight(shape, packed_dtype)
    linear = PackedLinear(weight, bias, any_library)
    x = torch.randn(700, shape[1], generator=torch.Generator().manual_seed(2)).to(packed_dtype)
    whole = linear(x)
    assert_close(whole, x.double() @ weight.double().T + bias.double())
    for num_rows in (*range(1, 20), 22, 31, 33, 60, 64, 90, 200, 330, 641):
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows])


@pytest.mark.parametrize("shape", [*SHAPES, (80, 40), (192, 64)])
@pytest.mark.parametrize("packed_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_rows_equal_those_of_the_weight_bit_for_bit(any_library, shape, packed_dtype):
    """Including weights whose exponents have no code in the compressed format."""
    weight = make_weight(shape, packed_dtype)[0]
    weight[0, 0], weight[-1, -1] = 2.0**-100, float("nan")
    linear = PackedLinear(weight, None, any_library)
    indices = torch.tensor([[shape[0] - 1, 0], [shape[0] // 2, shape[0] - 1]])
    for some in (indices, torch.arange(shape[0]), indices[:0]):
        assert torch.equal(linear.rows(some).view(torch.int8), weight[some].view(torch.int8))


@pytest.mark.parametrize("index", [-1, 12])
def test_a_row_index_out_of_range_is_refused(cpu_library, index):
    linear = PackedLinear(make_weight((12, 10), torch.float32)[0], None, cpu_library)
    with pytest.raises(ValueError, match="out of range"):
        linear.rows(torch.tensor([3, index]))


@pytest.mark.parametrize("num_rows", [1, 16, 21, 40])
@pytest.mark.parametrize("shape", [(33, 100), (80, 64)])
def test_values_around_the_rows_have_no_effect(any_library, shape, num_rows):
    weight, bias = make_weight(shape, torch.bfloat16)
    linear = PackedLinear(weight, bias, any_library)
    around = torch.full((num_rows + 32, shape[1] + 64), torch.nan, dtype=torch.bfloat16)
    x = around[16 : num_rows + 16, 32 : shape[1] + 32]
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(linear(x), linear(x.clone()))


def test_the_weight_can_be_freed_after_packing():
    weight, _ = make_weight((64, 32), torch.float32)
    linear, alive = PrepackedLinear(weight), weakref.ref(weight)
    del weight
    gc.collect()
    assert linear.is_packed
    assert alive() is None


def test_a_dtype_without_a_kernel_is_refused_by_name(cpu_library):
    weight, _ = make_weight((8, 4), torch.float16)
    assert packed_bytes(weight, cpu_library) == 0
    with pytest.raises(ValueError, match="float16"):
        PackedLinear(weight, None, cpu_library)


def test_too_little_memory_for_a_product_raises_a_memory_error(cpu_library):
    """A child process may map 16 MiB more: enough for the result (1.3 MB), not for the 40,000 packed rows (82 MB)."""
    linear, x = PackedLinear(torch.randn(8, 512), None, cpu_library), torch.randn(40_000, 512)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + (16 << 20),) * 2)
        try:
            linear(x)
        except MemoryError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_row_major_shares_a_tied_weight(cpu_library, assert_close):
    weight, _ = make_weight((64, 32), torch.float32)
    linear = RowMajorLinear(weight, library=cpu_library)
    weight.mul_(2)
    x = torch.randn(3, 32)
    assert_close(linear(x), x.double() @ weight.double().T)


@pytest.mark.parametrize("backend_name", ["cpu", "reference"])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
def test_multiplies_into_columns_of_a_wider_output(backend_name, num_rows, dtype, assert_close, cpu_library):
    backend = CpuBackend(cpu_library) if backend_name == "cpu" else ReferenceBackend()
    weight, _ = make_weight((70, 64), dtype)
    x = torch.randn(num_rows, 67, generator=torch.Generator().manual_seed(num_rows)).to(dtype)[:, 3:]
    y = torch.full((num_rows, 80), 7.0, dtype=dtype)
    backend.linear_into(y[:, 4:74], x, weight)
    assert_close(y[:, 4:74], x.double() @ weight.double().T)
    assert (y[:, :4] == 7).all()
    assert (y[:, 74:] == 7).all()


def test_multiplying_into_an_output_refuses_what_does_not_fit(cpu_library):
    backend, weight = CpuBackend(cpu_library), torch.randn(8, 4)
    for y, x in (
        (torch.empty(2, 7), torch.empty(2, 4)),
        (torch.empty(2, 8), torch.empty(2, 5)),
        (torch.empty(3, 8), torch.empty(2, 4)),
        (torch.empty(2, 8), torch.empty(2, 4).bfloat16()),
        (torch.empty(8, 2).T, torch.empty(2, 4)),
    ):
        with pytest.raises(ValueError, match=r"(x|y).* is "):
            backend.linear_into(y, x, weight)


def test_refuses_inputs_that_do_not_fit(kind, request):
    weight, bias = make_weight((8, 4), torch.float32)
    with pytest.raises(ValueError, match="bias"):
        make_linear(kind, weight, bias[:-1], request)
    if kind != "no-library":
        linear = make_linear(kind, weight, bias, request)
        for x in (torch.randn(2, 5), torch.randn(2, 4).bfloat16()):
            with pytest.raises(ValueError, match="x is"):
                linear(x)

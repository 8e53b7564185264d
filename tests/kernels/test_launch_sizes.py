import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import loraserve_kernels
import pytest
from loraserve_kernels.launch_sizes import ceil_div, power_of_2

TRITON_OPS = Path(inspect.getfile(loraserve_kernels)).parent / "triton_ops"


@pytest.mark.parametrize("tile", [1, 2, 7, 128])
def test_ceil_div_is_the_smallest_number_of_tiles_that_hold_all(tile):
    for size in range(300):
        assert (ceil_div(size, tile) - 1) * tile < size <= ceil_div(size, tile) * tile or size == 0
    assert ceil_div(0, tile) == 0


def test_power_of_2_is_the_smallest_power_that_is_not_below_its_argument():
    for size in range(1, 300):
        power = power_of_2(size)
        assert power.bit_count() == 1
        assert power // 2 < size <= power


def calls_of_triton(code: str) -> Iterator[str]:
    """Attributes taken from `triton` itself except its decorator: functions that are slow on the host."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "triton" and node.attr != "jit":
            yield node.attr


def test_triton_ops_do_not_call_tritons_slow_size_functions():
    found = {path.name: [*calls_of_triton(path.read_text())] for path in TRITON_OPS.glob("*.py")}
    assert {name for name, calls in found.items() if calls} == set()
    assert [*calls_of_triton("import triton\n@triton.jit\ndef f(): return triton.cdiv(5, 3)")] == ["cdiv"]

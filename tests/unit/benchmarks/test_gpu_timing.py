"""What GPU benchmarks make of times and sizes, with made-up figures."""

import pytest
from gpu.timing import MAX_SETS, POOL_BYTES, Ceilings, pool_size

CEILINGS = Ceilings(copy_bytes_per_s=2e12, read_bytes_per_s=4e12, flops_per_s=8e14, launch_us=2.5)


@pytest.mark.parametrize(
    ("size_bytes", "flops", "floor_us"),
    [
        (40_000_000, 0, 10.0),  # by the larger bandwidth
        (40_000_000, 4_000_000_000, 10.0),
        (40_000_000, 16_000_000_000, 20.0),
        (0, 16_000_000_000, 20.0),
        (4_000_000, 800_000_000, 2.5),  # 1 µs each
        (0, 0, 2.5),
    ],
)
def test_a_floor_is_the_largest_of_bytes_arithmetic_and_launch(size_bytes: int, flops: float, floor_us: float) -> None:
    assert CEILINGS.floor_us(size_bytes, flops) == pytest.approx(floor_us)


def test_bytes_take_their_time_at_the_larger_bandwidth_whichever_that_is() -> None:
    copies_faster = Ceilings(copy_bytes_per_s=5e12, read_bytes_per_s=4e12, flops_per_s=8e14, launch_us=2.5)
    assert CEILINGS.bytes_per_s == 4e12
    assert copies_faster.bytes_per_s == 5e12
    assert copies_faster.floor_us(40_000_000, 0) == pytest.approx(8.0)


def test_argument_sets_together_are_larger_than_the_cache_but_not_too_many() -> None:
    assert pool_size(POOL_BYTES // 8) == 8
    assert pool_size(POOL_BYTES // 8 + 1) == 8
    assert pool_size(POOL_BYTES // 8 - 1) == 9
    assert pool_size(POOL_BYTES * 3) == 2
    assert pool_size(100) == pool_size(0) == MAX_SETS

"""Figures that GPU benchmarks derive from times and sizes, with made-up inputs."""

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
def test_a_floor_is_the_largest_of_byte_time_arithmetic_time_and_launch_time(
    size_bytes: int, flops: float, floor_us: float
) -> None:
    assert CEILINGS.floor_us(size_bytes, flops) == pytest.approx(floor_us)


def test_byte_time_uses_the_larger_of_copy_and_read_bandwidth() -> None:
    copies_faster = Ceilings(copy_bytes_per_s=5e12, read_bytes_per_s=4e12, flops_per_s=8e14, launch_us=2.5)
    assert CEILINGS.bytes_per_s == 4e12
    assert copies_faster.bytes_per_s == 5e12
    assert copies_faster.floor_us(40_000_000, 0) == pytest.approx(8.0)


def test_the_number_of_argument_sets_covers_the_cache_within_its_limits() -> None:
    assert pool_size(POOL_BYTES // 8) == 8
    assert pool_size(POOL_BYTES // 8 + 1) == 8
    assert pool_size(POOL_BYTES // 8 - 1) == 9
    assert pool_size(POOL_BYTES * 3) == 2
    assert pool_size(100) == pool_size(0) == MAX_SETS

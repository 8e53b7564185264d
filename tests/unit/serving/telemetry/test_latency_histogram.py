import random

import pytest

from loraserve.serving.telemetry.latency_histogram import LATENCY_EDGES_MS, bucket_of, percentile_ms
from loraserve.serving.telemetry.latency_totals import LatencyTotals


def counted(latencies: list[float]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for latency in latencies:
        counts[bucket_of(latency)] = counts.get(bucket_of(latency), 0) + 1
    return counts


def test_a_bucket_includes_its_upper_edge() -> None:
    for index, edge in enumerate(LATENCY_EDGES_MS):
        assert bucket_of(edge) == index
    assert bucket_of(0.0) == 0
    assert bucket_of(1e9) == len(LATENCY_EDGES_MS) - 1


@pytest.mark.parametrize("fraction", [0.5, 0.95, 0.99])
def test_percentiles_are_right_to_within_a_bucket(fraction: float) -> None:
    drawn = random.Random(0)
    latencies = sorted(drawn.lognormvariate(4, 1) for _ in range(5000))
    true = latencies[int(fraction * len(latencies)) - 1]
    told = percentile_ms(counted(latencies), fraction)
    assert told is not None
    assert abs(told / true - 1) < 0.15


def test_merged_counts_have_the_percentiles_of_all_latencies_together() -> None:
    fast, slow = [2.0] * 95, [900.0] * 5
    merged = counted(fast)
    for bucket, count in counted(slow).items():
        merged[bucket] = merged.get(bucket, 0) + count
    assert merged == counted(fast + slow)
    high = percentile_ms(merged, 0.99)
    assert high is not None
    assert high > 500


def test_empty_counts_have_no_percentile() -> None:
    assert percentile_ms({}, 0.5) is None
    assert percentile_ms({3: 0}, 0.5) is None


def test_taking_totals_resets_them_to_zero() -> None:
    totals = LatencyTotals()
    totals.first_token(0.1)
    totals.next_token(0.01)
    totals.num_errors += 1
    taken = totals.take()
    assert (dict(taken.ttft), dict(taken.itl), taken.num_errors) == ({bucket_of(100): 1}, {bucket_of(10): 1}, 1)
    again = totals.take()
    assert (dict(again.ttft), dict(again.itl), again.num_errors) == ({}, {}, 0)

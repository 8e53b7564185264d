import pytest
from gpu.decode import LONG_GAP_US, TraceEvent, per_step, waits_us
from gpu.record import Figure


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([(10.0, 20.0)], 0.0),
        ([(0.0, 10.0), (40.0, 50.0), (150.0, 160.0)], 30.0 + 100.0),
        # The profiler does not sort them.
        ([(150.0, 160.0), (0.0, 10.0), (40.0, 50.0)], 30.0 + 100.0),
        # From one node of a graph to the next.
        ([(0.0, 10.0), (12.0, 20.0), (20.0 + LONG_GAP_US, 30.0)], LONG_GAP_US),
        # A short kernel beside a long copy on another stream ends before it.
        ([(0.0, 100.0), (10.0, 20.0), (120.0, 130.0)], 20.0),
    ],
)
def test_the_gpu_waits_in_long_gaps_in_which_nothing_runs(
    intervals: list[tuple[float, float]], expected: float
) -> None:
    assert waits_us(intervals) == expected


def test_the_hosts_time_is_what_it_does_not_wait_for_the_gpu() -> None:
    events = [
        TraceEvent("cudaGraphLaunch", 0.0, 100.0, False),
        TraceEvent("Memcpy HtoD (Pinned -> Device)", 50.0, 60.0, True),
        TraceEvent("a kernel", 60.0, 560.0, True),
        TraceEvent("cudaEventSynchronize", 110.0, 600.0, False),
        TraceEvent("a kernel", 760.0, 1260.0, True),
        TraceEvent("cudaEventSynchronize", 800.0, 1310.0, False),
    ]
    assert per_step(events, seconds=1.5e-3, num_steps=2) == {
        Figure.HOST: pytest.approx((1.5 - 0.49 - 0.51) / 2),
        Figure.GPU_BUSY: pytest.approx((0.01 + 0.5 + 0.5) / 2),
        Figure.GPU_WAITS: pytest.approx(0.2),
        Figure.UPLOADS: 0.5,
        Figure.LAUNCHES: 1.5,
    }

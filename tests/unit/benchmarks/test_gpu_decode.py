import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from gpu.decode import LONG_GAP_US, Side, TraceEvent, closed_loops, host_ms, per_step, step_waits_us, waits_us
from gpu.record import Arm, Figure
from gpu.work import RANK_16, Work

from loraserve.engine.engine import Engine
from tests.support.clock import Clock


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([(10.0, 20.0)], 0.0),
        ([(0.0, 10.0), (40.0, 50.0), (150.0, 160.0)], 30.0 + 100.0),
        # The profiler does not sort intervals.
        ([(150.0, 160.0), (0.0, 10.0), (40.0, 50.0)], 30.0 + 100.0),
        # Short gaps between the nodes of a graph do not count.
        ([(0.0, 10.0), (12.0, 20.0), (20.0 + LONG_GAP_US, 30.0)], LONG_GAP_US),
        # A short kernel ends before a long copy that runs at the same time on another stream.
        ([(0.0, 100.0), (10.0, 20.0), (120.0, 130.0)], 20.0),
    ],
)
def test_gpu_waits_are_long_gaps_in_which_nothing_runs(intervals: list[tuple[float, float]], expected: float) -> None:
    assert waits_us(intervals) == expected


def test_host_time_excludes_waiting_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)

    def wait(_: torch.cuda.Event) -> None:
        clock.now += 0.05

    monkeypatch.setattr(torch.cuda.Event, "synchronize", wait)

    class WaitingEngine:
        def step(self) -> list[SimpleNamespace]:
            clock.now += 0.01
            torch.cuda.Event.synchronize(cast("torch.cuda.Event", None))
            return [SimpleNamespace(error=None, token_ids=[1])] * 2

    assert host_ms(cast("Engine", WaitingEngine()), batch_size=2, num_steps=3) == pytest.approx(10)
    assert torch.cuda.Event.synchronize is wait, "left as it was"


def test_per_step_derives_gpu_figures_from_a_profile() -> None:
    events = [
        TraceEvent("cudaGraphLaunch", 0.0, 100.0, False),
        TraceEvent("Memcpy HtoD (Pinned -> Device)", 50.0, 60.0, True),
        TraceEvent("a kernel", 60.0, 560.0, True),
        TraceEvent("a kernel", 760.0, 1260.0, True),
    ]
    assert per_step(events, num_steps=2) == {
        Figure.GPU_BUSY: pytest.approx((0.01 + 0.5 + 0.5) / 2),
        Figure.GPU_WAITS: pytest.approx(0.2),
        Figure.GPU_WAITS_P50: pytest.approx(0.2),
        Figure.UPLOADS: 0.5,
        Figure.LAUNCHES: 1.5,
    }


def test_the_median_wait_is_not_affected_by_one_long_step() -> None:
    waits, events, end = [10.0, 20.0, 1000.0, 30.0], [], 0.0
    for wait in [*waits, 0.0]:
        upload, kernels = TraceEvent("Memcpy HtoD", end, end + 5, True), []
        for name in ("a kernel", "a kernel", "another kernel"):
            start = kernels[-1].end if kernels else upload.end
            kernels.append(TraceEvent(name, start, start + 50, True))
        events += [*kernels[::-1], upload]
        end = kernels[-1].end + wait
    assert step_waits_us(events, 5) == waits
    figures = per_step(events, num_steps=5)
    assert figures[Figure.GPU_WAITS_P50] == pytest.approx(0.025)
    assert figures[Figure.GPU_WAITS] == pytest.approx(sum(waits) / 4 / 1e3)
    # One more step was in flight when the profile began.
    assert step_waits_us(events, 4) == waits


def test_steps_that_cannot_be_told_apart_have_no_median_wait() -> None:
    events = [TraceEvent("a kernel", start, start + 10, True) for start in range(0, 1000, 100)]
    assert step_waits_us(events, 3) == []
    assert Figure.GPU_WAITS_P50 not in per_step(events, num_steps=3)


class FakeEngine:
    """Has at most one request, given as its number of steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_left = 0

    def add_request(self, num_steps: int) -> None:
        self.num_left = num_steps

    def has_work(self) -> bool:
        return self.num_left > 0


def test_engines_take_turns_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def step_times(engine: FakeEngine, _: int) -> Iterator[float]:
        while engine.has_work():
            engine.num_left -= 1
            steps.append(engine.name)
            yield float(len(steps))

    monkeypatch.setattr("gpu.decode.make_requests", lambda _engine, _digests, _num_prompt, num_output: [num_output])
    monkeypatch.setattr("gpu.decode.step_times", step_times)
    sides = [Side(cast(Engine, FakeEngine(name)), arm, []) for name, arm in (("A", Arm.NO_LORA), ("B", Arm.LORA))]
    base, _, with_lora, _ = closed_loops(sides, Work(num_tokens=7, warm_tokens=1, turn_steps=3), 64, RANK_16)
    assert "".join(steps) == "AB" + "AB" + "AAABBB" + "BBBAAA"
    # The third step of each turn counts.
    assert (base.arm, base.value, base.repeats) == (Arm.NO_LORA, (7 + 16) / 2 * 1e3, 2)
    assert (with_lora.arm, with_lora.value, with_lora.repeats) == (Arm.LORA, (10 + 13) / 2 * 1e3, 2)

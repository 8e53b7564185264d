"""Decode steps of a whole batch on a GPU: their duration (T1), and what happens in them (T5)."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import torch
from gpu.engine import checked, make_requests, share, step_times
from gpu.record import Arm, Figure, Record, spread
from gpu.work import AdapterKind, Work

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest

LONG_GAP_US = 5.0
"""Longer gaps are waits for the host: the GPU goes from one graph node to the next faster (a whole small node takes 1.5
to 2.5 µs)."""
NUM_KERNELS = 16
"""Kernels of a profile to print."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the engines that take turns."""

    engine: Engine
    arm: Arm
    digests: Sequence[str]
    """Adapters of its requests; empty = the base model."""


def closed_loops(sides: Sequence[Side], work: Work, batch_size: int, kind: AdapterKind) -> list[Record]:
    """T1: all requests arrive at once; then the engines take turns of a few decode steps each: A, B, B, A, ...

    The first round warms up: it compiles kernels and loads the adapters onto the device.
    """
    for side in sides:
        for request in _requests(side, work, batch_size, work.warm_tokens):
            side.engine.add_request(request)
        list(step_times(side.engine, batch_size))
    runs = [_Run(side, work, batch_size) for side in sides]
    order = list(runs)
    while any(run.side.engine.has_work() for run in runs):
        for run in order:
            run.take_turn()
        order.reverse()
    return [record for run in runs for record in run.records(kind)]


class _Run:
    def __init__(self, side: Side, work: Work, batch_size: int) -> None:
        """Computes the prompts."""
        self.side = side
        self._work = work
        self._batch_size = batch_size
        self._times: list[float] = []
        self._num_turns = 0
        requests = _requests(side, work, batch_size, work.num_tokens)
        started = time.perf_counter()
        for request in requests:
            side.engine.add_request(request)
        next(step_times(side.engine, batch_size))
        self._seconds = time.perf_counter() - started

    def take_turn(self) -> None:
        """Its first two steps do not count: the other engine's step may be in flight, or a step with prompts ends."""
        started = time.perf_counter()
        times = list(islice(step_times(self.side.engine, self._batch_size), self._work.turn_steps))[2:]
        self._seconds += time.perf_counter() - started
        self._times += times
        self._num_turns += bool(times)

    def records(self, kind: AdapterKind) -> list[Record]:
        side, size, num_tokens = self.side, self._batch_size, self._work.num_tokens
        about = (size, len(side.digests), num_tokens, num_tokens)
        step = spread(side.arm, Figure.DECODE_STEP, about, [seconds * 1e3 for seconds in self._times])
        return [
            replace(step, adapters=kind.name, repeats=self._num_turns),
            Record(side.arm, Figure.OUTPUT, *about, size * num_tokens / self._seconds, kind.name),
        ]


def _requests(side: Side, work: Work, batch_size: int, num_output: int) -> list[EngineRequest]:
    return make_requests(side.engine, share(side.digests, batch_size), work.num_tokens, num_output)


def profile_steps(engine: Engine, work: Work, arm: Arm, batch_size: int, digests: Sequence[str]) -> list[Record]:
    """T5, for pure decode steps. Profiling slows the host: without it, the GPU waits less."""
    num_prompt_steps = -(-2 * batch_size * work.num_tokens // work.max_num_batched_tokens)  # in which others decode
    num_output = num_prompt_steps + work.warm_tokens + 2 * work.profiled_steps
    for request in make_requests(engine, share(digests, batch_size), work.num_tokens, num_output):
        engine.add_request(request)
    next(step_times(engine, batch_size))
    host = host_ms(engine, batch_size, work.profiled_steps)
    with torch.profiler.profile(activities=[_activity()]) as profiler:
        started = time.perf_counter()
        _take_steps(engine, batch_size, work.profiled_steps)
        seconds = time.perf_counter() - started
    list(step_times(engine, batch_size))
    events = [
        TraceEvent(event.name, event.time_range.start, event.time_range.end, event.device_type.name == "CUDA")
        for event in profiler.events() or []
    ]
    about = (batch_size, len(digests), work.num_tokens, num_output)
    figures = {Figure.HOST: host, Figure.PROFILED_STEP: seconds * 1e3 / work.profiled_steps}
    if any(event.is_on_gpu for event in events):
        figures |= per_step(events, work.profiled_steps)
        print_kernels(events, work.profiled_steps)
    return [Record(arm, figure, *about, value) for figure, value in figures.items()]


def host_ms(engine: Engine, batch_size: int, num_steps: int) -> float:
    """Time per step without the host's waits for GPU events; without a profiler, which adds work of its own."""
    with _noted_waits() as waits:
        started = time.perf_counter()
        _take_steps(engine, batch_size, num_steps)
        seconds = time.perf_counter() - started
    return (seconds - sum(waits)) * 1e3 / num_steps


def _take_steps(engine: Engine, batch_size: int, num_steps: int) -> None:
    for _ in range(num_steps):
        num_outputs = len(checked(engine.step()))
        assert num_outputs == batch_size, f"{num_outputs} tokens in a step of {batch_size} sequences"


@contextmanager
def _noted_waits() -> Iterator[list[float]]:
    """Collects the seconds of each wait for a GPU event within the block."""
    waits: list[float] = []
    synchronize = torch.cuda.Event.synchronize

    def noted(self: torch.cuda.Event) -> None:
        started = time.perf_counter()
        synchronize(self)
        waits.append(time.perf_counter() - started)

    torch.cuda.Event.synchronize = noted
    try:
        yield waits
    finally:
        torch.cuda.Event.synchronize = synchronize


def _activity() -> torch.profiler.ProfilerActivity:
    """A trace of the GPU's work includes the host's calls that start it."""
    activities = torch.profiler.ProfilerActivity
    return activities.CUDA if activities.CUDA in torch.profiler.supported_activities() else activities.CPU


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event of a profile; times in µs."""

    name: str
    start: float
    end: float
    is_on_gpu: bool


def print_kernels(events: Sequence[TraceEvent], num_steps: int) -> None:
    """Prints the kernels that take most of a step's time on the GPU."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.is_on_gpu:
            times[event.name].append(event.end - event.start)
    for name in sorted(times, key=lambda name: -sum(times[name]))[:NUM_KERNELS]:
        each = times[name]
        print(f"{sum(each) / num_steps:9.1f} us a step, {len(each) / num_steps:6.1f} calls  {name[:90]}", flush=True)


def per_step(events: Sequence[TraceEvent], num_steps: int) -> dict[Figure, float]:
    """Needs at least two steps. Leaves out the median of the waits if no event name delimits the steps."""
    on_gpu = [event for event in events if event.is_on_gpu]
    intervals = [(event.start, event.end) for event in on_gpu]
    return {
        Figure.GPU_BUSY: sum(end - start for start, end in intervals) / 1e3 / num_steps,
        Figure.GPU_WAITS: waits_us(intervals) / 1e3 / (num_steps - 1),
        Figure.UPLOADS: sum("HtoD" in event.name for event in on_gpu) / num_steps,
        Figure.LAUNCHES: len(on_gpu) / num_steps,
        **(
            {Figure.GPU_WAITS_P50: statistics.median(waits) / 1e3}
            if (waits := step_waits_us(on_gpu, num_steps))
            else {}
        ),
    }


def step_waits_us(on_gpu: Sequence[TraceEvent], num_steps: int) -> list[float]:
    """`waits_us` of each whole step; an event that every step has once delimits the steps.

    A step in flight when the profile begins or ends may add one. Empty if there is no such event.
    """
    on_gpu = sorted(on_gpu, key=lambda event: event.start)
    counts = Counter(event.name for event in on_gpu)
    of_steps = [event.name for event in on_gpu if abs(counts[event.name] - num_steps) <= 1]
    if not of_steps:
        return []
    marker = min(of_steps, key=lambda name: abs(counts[name] - num_steps))
    marks = [index for index, event in enumerate(on_gpu) if event.name == marker]
    steps = [on_gpu[first : last + 1] for first, last in pairwise(marks)]
    return [waits_us([(event.start, event.end) for event in step]) for step in steps]


def waits_us(intervals: Sequence[tuple[float, float]]) -> float:
    """Sum of the gaps of at least `LONG_GAP_US` in which nothing runs, from the first (start, end) to the last.

    For n steps it includes the n - 1 pauses between them and the waits within them.
    """
    total, busy_until = 0.0, float("inf")
    for start, end in sorted(intervals):
        gap = start - busy_until
        total += gap if gap >= LONG_GAP_US else 0.0
        busy_until = end if busy_until == float("inf") else max(busy_until, end)
    return total

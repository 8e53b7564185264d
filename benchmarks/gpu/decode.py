"""Decode steps of a whole batch on a GPU: how long they take (T1), and what happens in them (T5)."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpu.engine import checked, make_requests, share, step_times
from gpu.record import Arm, Figure, Record
from gpu.work import AdapterKind, Work

from loraserve.engine.engine import Engine

LONG_GAP_US = 5.0
"""From a graph's node to the next the GPU needs less (1.5 to 2.5 µs for all of a small node): what is longer is the
host's."""
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")
"""What the host calls to wait for the GPU."""


def closed_loop(
    engine: Engine, work: Work, arm: Arm, batch_size: int, digests: Sequence[str], kind: AdapterKind
) -> list[Record]:
    """T1: all requests at once. The first round warms up: it compiles, and brings the adapters to the device."""
    shared = share(digests, batch_size)
    for request in make_requests(engine, shared, work.num_tokens, work.warm_tokens):
        engine.add_request(request)
    list(step_times(engine, batch_size))
    for request in make_requests(engine, shared, work.num_tokens, work.num_tokens):
        engine.add_request(request)
    started = time.perf_counter()
    times = list(step_times(engine, batch_size))[2:]  # the first one or two compute prompts
    seconds = time.perf_counter() - started
    about = (batch_size, len(digests), work.num_tokens, work.num_tokens)
    return [
        Record(arm, Figure.DECODE_STEP, *about, statistics.median(times) * 1e3, kind.name),
        Record(arm, Figure.DECODE_STEP_P90, *about, statistics.quantiles(times, n=10)[-1] * 1e3, kind.name),
        Record(arm, Figure.OUTPUT, *about, batch_size * work.num_tokens / seconds, kind.name),
    ]


def profile_steps(engine: Engine, work: Work, arm: Arm, batch_size: int, digests: Sequence[str]) -> list[Record]:
    """T5, of pure decode steps. Profiling slows the host: without, it needs less time, and the GPU waits less."""
    num_prompt_steps = -(-2 * batch_size * work.num_tokens // work.max_num_batched_tokens)  # others decode beside them
    num_output = num_prompt_steps + work.warm_tokens + work.profiled_steps
    for request in make_requests(engine, share(digests, batch_size), work.num_tokens, num_output):
        engine.add_request(request)
    next(step_times(engine, batch_size))
    with torch.profiler.profile(activities=[_activity()]) as profiler:
        started = time.perf_counter()
        for _ in range(work.profiled_steps):
            num_outputs = len(checked(engine.step()))
            assert num_outputs == batch_size, f"{num_outputs} tokens in a step of {batch_size} sequences"
        seconds = time.perf_counter() - started
    list(step_times(engine, batch_size))
    events = [
        TraceEvent(event.name, event.time_range.start, event.time_range.end, event.device_type.name == "CUDA")
        for event in profiler.events() or []
    ]
    about = (batch_size, len(digests), work.num_tokens, num_output)
    figures = {Figure.PROFILED_STEP: seconds * 1e3 / work.profiled_steps}
    if any(event.is_on_gpu for event in events):
        figures |= per_step(events, seconds, work.profiled_steps)
    return [Record(arm, figure, *about, value) for figure, value in figures.items()]


def _activity() -> torch.profiler.ProfilerActivity:
    """With the GPU's work come the host's calls that start it and wait for it."""
    activities = torch.profiler.ProfilerActivity
    return activities.CUDA if activities.CUDA in torch.profiler.supported_activities() else activities.CPU


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Of a profile; times in µs."""

    name: str
    start: float
    end: float
    is_on_gpu: bool


def per_step(events: Sequence[TraceEvent], seconds: float, num_steps: int) -> dict[Figure, float]:
    """seconds: of all steps together. Two at least."""
    on_gpu = [event for event in events if event.is_on_gpu]
    intervals = [(event.start, event.end) for event in on_gpu]
    waited_us = sum(event.end - event.start for event in events if not event.is_on_gpu and event.name in WAITS)
    return {
        Figure.HOST: (seconds * 1e3 - waited_us / 1e3) / num_steps,
        Figure.GPU_BUSY: sum(end - start for start, end in intervals) / 1e3 / num_steps,
        Figure.GPU_WAITS: waits_us(intervals) / 1e3 / (num_steps - 1),
        Figure.UPLOADS: sum("HtoD" in event.name for event in on_gpu) / num_steps,
        Figure.LAUNCHES: len(on_gpu) / num_steps,
    }


def waits_us(intervals: Sequence[tuple[float, float]]) -> float:
    """Sum of the gaps of at least `LONG_GAP_US` in which nothing runs, from the first (start, end) to the last.

    Of n steps it has the n - 1 pauses between them, and what the GPU waits for within them.
    """
    total, busy_until = 0.0, float("inf")
    for start, end in sorted(intervals):
        gap = start - busy_until
        total += gap if gap >= LONG_GAP_US else 0.0
        busy_until = end if busy_until == float("inf") else max(busy_until, end)
    return total

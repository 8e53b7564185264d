"""Sends planned requests: a closed loop keeps a fixed number running, an open loop sends each at its time."""

import asyncio
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from loraserve.cli.interruption import ended_by_signals
from loraserve.cli.loadtest.client import RequestResult, RequestStyle, send
from loraserve.cli.loadtest.plan import PlannedRequest

OnResult = Callable[[RequestResult], None]


@dataclass(frozen=True, slots=True)
class BenchRun:
    results: list[RequestResult]
    wall_s: float
    client_cpu_s: float
    """CPU time of the load generator, which the server could not use."""
    interrupted_by: signal.Signals | None = None
    """The signal that ended it early."""


async def run(
    client: aiohttp.ClientSession,
    style: RequestStyle,
    requests: list[PlannedRequest],
    concurrency: int | None,
    on_result: OnResult,
) -> BenchRun:
    """concurrency: None = open loop. If a signal interrupts the run, unfinished requests are dropped without result."""
    began_s, cpu_began_s = time.perf_counter(), _cpu_s()
    results: list[RequestResult] = []

    def keep(result: RequestResult) -> None:
        results.append(result)
        on_result(result)

    with ended_by_signals() as interruption:
        if concurrency is None:
            await _open_loop(client, style, requests, keep)
        else:
            await _closed_loop(client, style, requests, concurrency, keep)
    return BenchRun(results, time.perf_counter() - began_s, _cpu_s() - cpu_began_s, interruption.by)


async def _closed_loop(
    client: aiohttp.ClientSession,
    style: RequestStyle,
    requests: list[PlannedRequest],
    concurrency: int,
    on_result: OnResult,
) -> None:
    waiting = iter(requests)

    async def keep_sending() -> None:
        for request in waiting:
            on_result(await send(client, style, request))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(keep_sending())


async def _open_loop(
    client: aiohttp.ClientSession, style: RequestStyle, requests: list[PlannedRequest], on_result: OnResult
) -> None:
    began_s = time.perf_counter()

    async def send_one(request: PlannedRequest, due_s: float) -> None:
        on_result(await send(client, style, request, due_s))

    async with asyncio.TaskGroup() as group:
        for request in requests:
            due_s = began_s + request.at_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(send_one(request, due_s))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

"""Sends a plan's requests: a closed loop keeps so many running, an open loop sends each at its time."""

import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from loraserve.cli.loadtest.client import RequestResult, RequestStyle, send
from loraserve.cli.loadtest.plan import PlannedRequest

TIMEOUT_S = 600.0

OnResult = Callable[[RequestResult], None]


@dataclass(frozen=True, slots=True)
class BenchRun:
    results: list[RequestResult]
    wall_s: float
    client_cpu_s: float
    """Processor time of the generator itself, which the server could not use."""


def http_client(url: str, api_key: str | None) -> httpx.AsyncClient:
    """The URL with or without /v1."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base_url = url.rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=base_url, headers=headers, limits=limits, timeout=TIMEOUT_S)


async def run(
    client: httpx.AsyncClient,
    style: RequestStyle,
    requests: list[PlannedRequest],
    concurrency: int | None,
    on_result: OnResult,
) -> BenchRun:
    """concurrency None = open loop."""
    began_s, cpu_began_s = time.perf_counter(), _cpu_s()
    if concurrency is None:
        results = await _open_loop(client, style, requests, on_result)
    else:
        results = await _closed_loop(client, style, requests, concurrency, on_result)
    return BenchRun(results, time.perf_counter() - began_s, _cpu_s() - cpu_began_s)


async def _closed_loop(
    client: httpx.AsyncClient,
    style: RequestStyle,
    requests: list[PlannedRequest],
    concurrency: int,
    on_result: OnResult,
) -> list[RequestResult]:
    waiting = iter(requests)
    results: list[RequestResult] = []

    async def keep_sending() -> None:
        for request in waiting:
            result = await send(client, style, request)
            results.append(result)
            on_result(result)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(keep_sending())
    return results


async def _open_loop(
    client: httpx.AsyncClient, style: RequestStyle, requests: list[PlannedRequest], on_result: OnResult
) -> list[RequestResult]:
    began_s = time.perf_counter()
    results: list[RequestResult] = []

    async def send_one(request: PlannedRequest, late_s: float) -> None:
        result = await send(client, style, request, late_s)
        results.append(result)
        on_result(result)

    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, began_s + request.at_s - time.perf_counter()))
            group.create_task(send_one(request, time.perf_counter() - began_s - request.at_s))
    return results


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

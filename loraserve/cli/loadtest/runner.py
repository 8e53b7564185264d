"""Sends a plan's requests: a closed loop keeps so many running, an open loop sends each at its time."""

import asyncio
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import httpx
import rich_click as click

from loraserve.cli.loadtest.client import RequestResult, RequestStyle, send
from loraserve.cli.loadtest.interruption import ended_by_signals
from loraserve.cli.loadtest.plan import PlannedRequest
from loraserve.cli.proxy import environment_proxy

TIMEOUT_S = 600.0
"""To connect, and between any two arrivals; a stream may take as long as it likes."""
KEEPALIVE_S = 2.0
"""Of an idle connection: less than servers keep one (uvicorn, and with it vLLM and SGLang, 5 s), so that no request
meets the end of its connection and counts as failed."""

OnResult = Callable[[RequestResult], None]


@dataclass(frozen=True, slots=True)
class BenchRun:
    results: list[RequestResult]
    wall_s: float
    client_cpu_s: float
    """Processor time of the generator itself, which the server could not use."""
    interrupted_by: signal.Signals | None = None
    """What ended it early."""


def http_client(url: str, api_key: str | None) -> aiohttp.ClientSession:
    """The URL with or without /v1. Needs a running event loop.

    aiohttp, whose parser is in C, because the server has to do without what the generator takes: 14 µs of CPU per token
    of 16 streams that arrive together and 22 of those that arrive one by one, httpx 52 and 75 (2-core Xeon).
    """
    headers = {"accept-encoding": "identity"}
    base_url = url.rstrip("/").removesuffix("/v1") + "/"
    # The certificates that all commands trust.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=httpx.create_ssl_context())
    timeout = aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    try:
        if api_key and urlsplit(base_url).username is None:  # a user in the URL takes the key's place
            headers["authorization"] = f"Bearer {api_key}"
        return aiohttp.ClientSession(
            base_url, connector=connector, headers=headers, timeout=timeout, proxy=_proxy(base_url)
        )
    except ValueError as error:
        raise click.ClickException(f"{url}: {error}") from error


async def run(
    client: aiohttp.ClientSession,
    style: RequestStyle,
    requests: list[PlannedRequest],
    concurrency: int | None,
    on_result: OnResult,
) -> BenchRun:
    """concurrency None = open loop. When a signal interrupts it, requests under way are given up and have no result."""
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


def _proxy(url: str) -> str | None:
    """The environment's. Not aiohttp's `trust_env`, which looks into .netrc in a thread for every request.

    Raises `click.ClickException` for a proxy of another kind.
    """
    proxy = environment_proxy(url)
    if proxy is None:
        return None
    if proxy.kind not in ("http", "https"):
        raise proxy.refusal(url)
    return proxy.url


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

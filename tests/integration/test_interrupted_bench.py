"""`loraserve bench` as a process that is sent signals while a server keeps requests waiting."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.loopback import stream
from tests.support.server_process import WAIT_S, command, environment

ANSWER = (
    b'data: {"choices":[{"text":"x"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)
CONCURRENCY = 2
NUM_REQUESTS = 10
NUM_ANSWERED = 3
OPTIONS = (
    *("--num-requests", str(NUM_REQUESTS), "--concurrency", str(CONCURRENCY)),
    *("--prompt-tokens", "4", "--output-tokens", "2"),
)


@dataclass(slots=True)
class SlowServer:
    """Answers some requests and only begins to answer the others."""

    num_answered: int
    num_waiting: int = 0
    is_full: asyncio.Event = field(default_factory=asyncio.Event)
    """All concurrent requests are waiting."""
    is_left: asyncio.Event = field(default_factory=asyncio.Event)

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base", "owned_by": "vllm"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if self.num_answered > 0:
            self.num_answered -= 1
            return await stream(request, [ANSWER])
        await stream(request, [b'data: {"choices":[{"text":"x"}]}\n\n'])
        self.num_waiting += 1
        if self.num_waiting == CONCURRENCY:
            self.is_full.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_left.set()
        raise AssertionError


@asynccontextmanager
async def bench_of(slow: SlowServer, *options: str) -> AsyncIterator[Process]:
    """Yields once requests are waiting."""
    app = web.Application()
    app.router.add_get("/v1/models", slow.list_models)
    app.router.add_post("/v1/completions", slow.complete)
    async with TestServer(app) as server:
        words = command("bench", str(server.make_url("/")), *OPTIONS, *options)
        bench = await asyncio.create_subprocess_exec(
            *words, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await asyncio.wait_for(slow.is_full.wait(), WAIT_S)
            yield bench
        finally:
            if bench.returncode is None:
                bench.kill()
                await bench.wait()


async def exit_code(bench: Process) -> int:
    return await asyncio.wait_for(bench.wait(), WAIT_S)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_requests_that_ended_before_an_interruption_are_reported(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    report_file, plot_file = tmp_path / "report.json", tmp_path / "plot.svg"

    async def interrupt() -> tuple[int, str]:
        options = ("--warm-up", "0", "--json", str(report_file), "--plot", str(plot_file))
        async with bench_of(SlowServer(NUM_ANSWERED), *options) as bench:
            bench.send_signal(number)
            output, _ = await asyncio.wait_for(bench.communicate(), WAIT_S)
            return await exit_code(bench), output.decode()

    ended_with, output = asyncio.run(interrupt())
    assert ended_with == code
    assert "interrupted" in output
    assert "failed:" not in output
    report: Any = json.loads(report_file.read_text())
    assert report["interrupted"]
    assert (report["total"]["num_requests"], report["total"]["num_failed"]) == (NUM_ANSWERED, 0)
    assert report["total"]["output_tokens"] == 2 * NUM_ANSWERED
    assert "<svg" in plot_file.read_text()


def test_an_interrupted_warm_up_reports_no_requests(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"

    async def interrupt() -> int:
        options = ("--warm-up", str(NUM_REQUESTS), "--json", str(report_file))
        async with bench_of(SlowServer(NUM_ANSWERED), *options) as bench:
            bench.send_signal(signal.SIGTERM)
            return await exit_code(bench)

    assert asyncio.run(interrupt()) == 143
    report: Any = json.loads(report_file.read_text())
    assert (report["interrupted"], report["total"]["num_requests"]) == (True, 0)


def test_a_second_signal_ends_the_bench_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "report.json"
    os.mkfifo(pipe)  # has no reader: the report is never written

    async def interrupt_twice() -> int:
        slow = SlowServer(NUM_ANSWERED)
        async with bench_of(slow, "--warm-up", "0", "--json", str(pipe)) as bench:
            bench.send_signal(signal.SIGINT)
            await asyncio.wait_for(slow.is_left.wait(), WAIT_S)
            bench.send_signal(signal.SIGINT)
            return await exit_code(bench)

    assert asyncio.run(interrupt_twice()) == 130

"""`loraserve batch` as a process that is interrupted and resumed."""

import asyncio
import json
import signal
from asyncio.subprocess import Process
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer

from tests.support.server_process import WAIT_S, command, environment

CONCURRENCY = 2
NUM_REQUESTS = 10
NUM_ANSWERED = 3


@dataclass(slots=True)
class SlowServer:
    """Answers some requests and keeps the others waiting until it breaks off their connections."""

    num_answered: int
    num_waiting: int = 0
    asked: Counter[str] = field(default_factory=Counter[str])
    is_full: asyncio.Event = field(default_factory=asyncio.Event)
    """All concurrent requests are waiting."""
    breaks_off: asyncio.Event = field(default_factory=asyncio.Event)
    """Waiting requests get no answer."""

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def complete(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        self.asked[prompt] += 1
        if self.num_answered > 0:
            self.num_answered -= 1
            return web.json_response({"text": prompt})
        self.num_waiting += 1
        if self.num_waiting == CONCURRENCY:
            self.is_full.set()
        await self.breaks_off.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/v1/completions", self.complete)
        return app


async def start_batch(server: BaseTestServer, folder: Path, *options: str) -> Process:
    files = str(folder / "requests.jsonl"), str(folder / "answers.jsonl")
    words = command("batch", *files, "--url", str(server.make_url("/")), "--concurrency", str(CONCURRENCY), *options)
    return await asyncio.create_subprocess_exec(
        *words, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def ended(batch: Process) -> tuple[int | None, str]:
    _, errors = await asyncio.wait_for(batch.communicate(), WAIT_S)
    return batch.returncode, errors.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Contains the file of requests."""
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{i}"}}
        for i in range(NUM_REQUESTS)
    ]
    (tmp_path / "requests.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


def answers_in(folder: Path) -> list[tuple[str, Any]]:
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return [(line["custom_id"], line["response"]["body"]["text"]) for line in lines]


ALL_ANSWERS = [(f"r{i}", f"p{i}") for i in range(NUM_REQUESTS)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_answers_from_before_an_interruption_are_kept_and_not_requested_again(
    number: signal.Signals, code: int, folder: Path
) -> None:
    async def interrupt_and_go_on() -> SlowServer:
        slow = SlowServer(NUM_ANSWERED)
        async with TestServer(slow.app()) as server:
            batch = await start_batch(server, folder)
            await asyncio.wait_for(slow.is_full.wait(), WAIT_S)
            batch.send_signal(number)
            status, told = await ended(batch)
            assert status == code
            if number is not signal.SIGKILL:
                assert f"{NUM_ANSWERED} of {NUM_REQUESTS} answered; --resume sends the rest" in told
            assert "Traceback" not in told
            assert len(answers_in(folder)) == NUM_ANSWERED
            slow.num_answered = NUM_REQUESTS
            status, told = await ended(await start_batch(server, folder, "--resume"))
            assert (status, f"{NUM_REQUESTS} of {NUM_REQUESTS} answered" in told) == (0, True)
        return slow

    slow = asyncio.run(interrupt_and_go_on())
    assert sorted(answers_in(folder)) == ALL_ANSWERS
    # Requests that were in flight are sent twice, those that were answered once.
    assert sorted(slow.asked.values()) == [1] * (NUM_REQUESTS - CONCURRENCY) + [2] * CONCURRENCY


def test_batch_waits_for_a_server_that_restarts(folder: Path) -> None:
    async def restart() -> SlowServer:
        slow = SlowServer(NUM_ANSWERED)
        async with TestServer(slow.app()) as server:
            batch = await start_batch(server, folder)
            await asyncio.wait_for(slow.is_full.wait(), WAIT_S)
            port = server.port
            slow.breaks_off.set()
        slow.num_answered = NUM_REQUESTS
        async with TestServer(slow.app(), port=port):
            status, told = await ended(batch)
            assert (status, f"{NUM_REQUESTS} of {NUM_REQUESTS} answered" in told) == (0, True)
        return slow

    asyncio.run(restart())
    assert sorted(answers_in(folder)) == ALL_ANSWERS


def test_a_second_run_without_resume_suggests_it(folder: Path) -> None:
    async def run_twice() -> tuple[int | None, str]:
        async with TestServer(SlowServer(NUM_REQUESTS).app()) as server:
            assert (await ended(await start_batch(server, folder)))[0] == 0
            return await ended(await start_batch(server, folder))

    status, told = asyncio.run(run_twice())
    assert status == 1
    assert "--resume" in told
    assert sorted(answers_in(folder)) == ALL_ANSWERS


def test_batch_stops_sending_once_the_server_is_gone(folder: Path) -> None:
    async def stop() -> tuple[int | None, str]:
        slow = SlowServer(NUM_ANSWERED)
        async with TestServer(slow.app()) as server:
            batch = await start_batch(server, folder, "--retry-for", "1")
            await asyncio.wait_for(slow.is_full.wait(), WAIT_S)
            slow.breaks_off.set()
        return await ended(batch)

    status, told = asyncio.run(stop())
    assert status == 1
    assert f"{NUM_ANSWERED} of {NUM_REQUESTS} answered, " in told
    assert "stopped, because the remaining requests would fail the same way" in told
    assert "--resume sends the rest" in told
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    failed = [line["error"]["code"] for line in lines if line["error"]]
    assert set(failed) == {"connection"}
    assert len(failed) < NUM_REQUESTS - NUM_ANSWERED


def test_a_change_of_the_requests_file_during_the_run_is_reported(folder: Path) -> None:
    """It has more requests than are read at once."""
    requests = folder / "requests.jsonl"
    padded = {"url": "/v1/completions", "body": {"prompt": "x" * 10_000}}
    requests.write_text("".join(json.dumps({"custom_id": f"r{i}", **padded}) + "\n" for i in range(50)))

    async def change() -> tuple[int | None, str]:
        slow = SlowServer(1)
        async with TestServer(slow.app()) as server:
            batch = await start_batch(server, folder)
            await asyncio.wait_for(slow.is_full.wait(), WAIT_S)
            requests.write_text("{}\n")
            slow.breaks_off.set()
            slow.num_answered = 100
            return await ended(batch)

    status, told = asyncio.run(change())
    assert status == 1
    assert "changed" in told
    assert "Traceback" not in told

import asyncio
from collections.abc import AsyncGenerator

import pytest
from litestar.types import Message, Scope

from loraserve.api.http.event_stream import PING, EventStream


class Exchange:
    """One response, sent to a client that takes `num_taken` body chunks and then no more, or leaves."""

    def __init__(self, stream: EventStream, num_taken: int) -> None:
        self._stream = stream
        self._num_taken = num_taken
        self.chunks: list[bytes] = []
        self.stuck = asyncio.Event()
        self.gone = asyncio.Event()

    async def run(self) -> None:
        scope: Scope = {"type": "http"}  # pyright: ignore[reportAssignmentType]
        response = self._stream.to_asgi_response(None, None)  # pyright: ignore[reportArgumentType]
        await response(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            return
        if len(self.chunks) == self._num_taken:
            self.stuck.set()
            await asyncio.Event().wait()
        self.chunks.append(message["body"])
        if not message["more_body"]:
            self.gone.set()


async def counting(count: int) -> AsyncGenerator[bytes]:
    for number in range(count):
        await asyncio.sleep(0)
        yield b"%d" % number


async def silent() -> AsyncGenerator[bytes]:
    await asyncio.Event().wait()
    yield b""


def test_ends_once_when_everything_is_sent() -> None:
    async def run() -> None:
        ends: list[str] = []
        exchange = Exchange(EventStream(counting(3), lambda: ends.append("end"), 10), num_taken=100)
        await exchange.run()
        assert exchange.chunks == [b"0", b"1", b"2", b""]
        assert ends == ["end"]

    asyncio.run(run())


def test_ends_when_the_client_leaves_while_a_chunk_is_being_sent() -> None:
    async def run() -> None:
        ends: list[str] = []
        body = counting(100)  # Referenced here so that garbage collection does not end the work.
        exchange = Exchange(EventStream(body, lambda: ends.append("end"), 10), num_taken=2)
        running = asyncio.create_task(exchange.run())
        await exchange.stuck.wait()
        assert ends == []
        exchange.gone.set()
        await running
        assert ends == ["end"]
        await body.aclose()

    asyncio.run(run())


def test_ends_when_the_server_cancels_it() -> None:
    async def run() -> None:
        ends: list[str] = []
        running = asyncio.create_task(Exchange(EventStream(silent(), lambda: ends.append("end"), 10), 9).run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ends == ["end"]

    asyncio.run(run())


def test_pings_only_while_nothing_else_is_sent() -> None:
    async def run() -> None:
        exchange = Exchange(EventStream(silent(), lambda: None, 0.01), num_taken=3)
        running = asyncio.create_task(exchange.run())
        await exchange.stuck.wait()
        assert exchange.chunks == [PING] * 3
        exchange.gone.set()
        await running
        quick = Exchange(EventStream(counting(50), lambda: None, 60), num_taken=100)
        await quick.run()
        assert PING not in quick.chunks

    asyncio.run(run())


class Drain(Exchange):
    """To a client that takes nothing until `room` is set; waiting messages are then sent in order."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__(stream, num_taken=100)
        self.room = asyncio.Event()
        self.waiting = asyncio.Semaphore(0)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not self.room.is_set():
            self.waiting.release()
            await self.room.wait()
        assert not self.gone.is_set(), "sent after the end"
        await super()._send(message)


def test_a_ping_that_waits_behind_the_last_chunk_is_not_sent_after_the_end() -> None:
    async def run() -> None:
        exchange = Drain(EventStream(counting(1), lambda: None, 0.01))
        running = asyncio.create_task(exchange.run())
        for _ in ("the chunk", "a ping"):
            await exchange.waiting.acquire()
        exchange.room.set()
        await running
        assert exchange.chunks == [b"0", b""]

    asyncio.run(run())

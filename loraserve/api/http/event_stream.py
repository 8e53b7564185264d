"""Server-sent event streams whose end is always noticed, whatever its cause."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from litestar import Litestar, Request
from litestar.background_tasks import BackgroundTask, BackgroundTasks
from litestar.datastructures.cookie import Cookie
from litestar.enums import MediaType
from litestar.response import Stream
from litestar.response.base import ASGIResponse
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import Receive, Scope, Send, TypeEncodersMap

CONTENT_TYPE = "text/event-stream"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream(Stream):
    """Sends `body` as it arrives, and a comment after each `ping_interval_s` of silence. Calls `on_end` exactly once.

    `on_end` also runs if the client disconnects while a chunk is being sent, in which case Litestar neither closes nor
    cancels the body. It must not block.
    """

    def __init__(
        self,
        body: AsyncIterator[bytes],
        on_end: Callable[[], None],
        ping_interval_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(body, media_type=CONTENT_TYPE, headers=HEADERS | (headers or {}))
        self.body = body
        self.on_end = on_end
        self.ping_interval_s = ping_interval_s

    def to_asgi_response(
        self,
        app: Litestar | None,
        request: Request,
        *,
        background: BackgroundTask | BackgroundTasks | None = None,
        cookies: Iterable[Cookie] | None = None,
        encoded_headers: Iterable[tuple[bytes, bytes]] | None = None,
        headers: dict[str, str] | None = None,
        is_head_response: bool = False,
        media_type: MediaType | str | None = None,
        status_code: int | None = None,
        type_encoders: TypeEncodersMap | None = None,
    ) -> ASGIResponse:
        return _ASGIEventStream(
            self,
            background=self.background or background,
            cookies=itertools.chain(self.cookies, cookies or []),
            encoded_headers=encoded_headers,
            headers={**(headers or {}), **self.headers},
            is_head_response=is_head_response,
            iterator=self.body,
            media_type=CONTENT_TYPE,
            status_code=self.status_code or status_code,
        )


class _ASGIEventStream(ASGIStreamingResponse):
    def __init__(self, stream: EventStream, **options: Any) -> None:
        super().__init__(**options)
        self._body = stream.body
        self._end = stream.on_end
        self._ping_interval_s = stream.ping_interval_s
        self._last_sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()

    async def send_body(self, send: Send, receive: Receive) -> None:
        async with asyncio.TaskGroup() as tasks:
            pings = tasks.create_task(self._ping(send))
            sending = [tasks.create_task(self._send_all(send, pings)), pings]
            # The server also reports a disconnect after the last chunk.
            while (await receive())["type"] != "http.disconnect":
                pass
            for task in sending:
                task.cancel()

    async def _send_all(self, send: Send, pings: asyncio.Task[None]) -> None:
        async for chunk in self._body:
            await self._send_chunk(send, chunk)
        # NOTE: a ping that is waiting for the client to read would be sent after the end.
        pings.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._last_sent_s
            if silent_s >= self._ping_interval_s:
                await self._send_chunk(send, PING)
                silent_s = 0.0
            await asyncio.sleep(self._ping_interval_s - silent_s)

    def _send_chunk(self, send: Send, chunk: bytes) -> Awaitable[None]:
        self._last_sent_s = time.monotonic()
        return send({"type": "http.response.body", "body": chunk, "more_body": True})

"""A proxy between a client and a unix socket that can hold replies back and switch to another socket."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

WAIT_S = 30.0


@dataclass(slots=True)
class DelayProxy:
    socket_path: Path
    target: Path
    """For new connections; existing ones stay where they are, as after a change in DNS."""
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, replies are held back."""
    num_held: int = 0
    """Replies held back now."""
    num_connections: int = 0

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    async def until_held(self, count: int = 1) -> None:
        """Wait until this many replies of Redis are held back."""
        async with asyncio.timeout(WAIT_S):
            while self.num_held < count:
                await asyncio.sleep(0.001)

    async def serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        far_reader, far_writer = await asyncio.open_unix_connection(self.target)
        try:
            async with asyncio.TaskGroup() as group:
                requests = group.create_task(self._forward(reader, far_writer))
                replies = group.create_task(self._hold(far_reader, writer))
                requests.add_done_callback(lambda _: replies.cancel())
        finally:
            for each in (writer, far_writer):
                each.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.num_held += 1
                await self.flowing.wait()
                self.num_held -= 1
                writer.write(data)


@asynccontextmanager
async def delay_proxy(folder: Path, target: Path) -> AsyncIterator[DelayProxy]:
    """Lets replies through at first."""
    proxy = DelayProxy(folder / "proxy.sock", target)
    proxy.flowing.set()
    server = await asyncio.start_unix_server(proxy.serve_client, proxy.socket_path)
    try:
        yield proxy
    finally:
        proxy.flowing.set()
        server.close()
        await asyncio.sleep(0)


@contextmanager
def proxy_of_a_thread(folder: Path, target: Path) -> Iterator[DelayProxy]:
    """For tests without an event loop."""
    started: list[tuple[DelayProxy, asyncio.AbstractEventLoop, asyncio.Event]] = []
    is_ready = threading.Event()

    async def serve() -> None:
        async with delay_proxy(folder, target) as proxy:
            is_over = asyncio.Event()
            started.append((proxy, asyncio.get_running_loop(), is_over))
            is_ready.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_ready.wait(WAIT_S)
    proxy, loop, is_over = started[0]
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(WAIT_S)

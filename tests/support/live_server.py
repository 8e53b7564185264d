"""The app behind a real uvicorn on a free port, in a thread: real bytes, real disconnects."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn

from loraserve.api.app import create_app
from loraserve.serving.registry import ResolvedAdapter
from loraserve.serving.runtime import Runtime, build_runtime
from loraserve.serving.settings import ServingSettings
from tests.support.fake_engine_client import FakeEngine

T = TypeVar("T")


@dataclass(slots=True)
class LiveServer:
    url: str
    engine: FakeEngine
    runtime: Runtime
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=10)

    def call(self, work: Callable[[], T]) -> T:
        async def calling() -> T:
            return work()

        return self.run(calling())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        async def waiting() -> None:
            while not condition():
                await asyncio.sleep(0.002)

        self.run(asyncio.wait_for(waiting(), 5))


def make_settings(data_dir: Path, **changes: object) -> ServingSettings:
    settings = ServingSettings(served_model_names=["tiny", "org/tiny-alias"], data_dir=data_dir)
    return msgspec.structs.replace(settings, **changes)


def register(runtime: Runtime, name: str, digest: str | None = None) -> None:
    runtime.registry.add(ResolvedAdapter(name, digest or f"digest-of-{name}".ljust(64, "0"), 8, 4096, created=1))


@contextmanager
def live_server(engine: FakeEngine, settings: ServingSettings, adapters: tuple[str, ...] = ()) -> Iterator[LiveServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    servers: list[tuple[uvicorn.Server, LiveServer]] = []

    async def serve() -> None:
        runtime = build_runtime(engine, settings)
        for name in adapters:
            register(runtime, name)
        config = uvicorn.Config(create_app(runtime), log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        servers.append((server, LiveServer(url, engine, runtime, asyncio.get_running_loop())))
        started.set()
        await server.serve(sockets=[listener])
        runtime.tokenizer.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    server, live = servers[0]
    try:
        yield live
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()

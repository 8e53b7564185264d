"""Runs the server: engine, adapters, HTTP; then drains on SIGTERM. Exit code 0 = stopped on request, 1 = failed."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import Any

import uvicorn
import uvloop
from loraserve_adapters.limits import DEFAULT_LIMITS, Limits
from rich.console import Console

from loraserve.api.app import create_app
from loraserve.cli.banner import Banner
from loraserve.cli.http_protocol import BoundedHttpProtocol
from loraserve.cli.listen import ListenError, base_url, bind_tcp, bind_unix
from loraserve.cli.serve_settings import ServeSettings
from loraserve.cli.startup_display import StartupDisplay
from loraserve.serving.errors import ServingError
from loraserve.serving.local_engine import EngineStartFailedError, LocalEngine
from loraserve.serving.runtime import Runtime, build_runtime

STARTING = "starting the engine"
ENGINE_GRACE_S = 10.0
"""An engine told to stop has this long before it is killed."""
HTTP_GRACE_S = 5
"""Connections have this long to take their last bytes once nothing runs any more."""
KEEP_ALIVE_S = 75
"""Longer than load balancers keep theirs (60 s), so that the server never closes one that is being reused."""


class StartError(Exception):
    """The server cannot start; the message is one line for a person."""


def run_server(settings: ServeSettings) -> int:
    """Returns the exit code once the server has stopped."""
    console = Console(stderr=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_Server(settings, console).run())
        except (StartError, ListenError, EngineStartFailedError) as error:
            console.print("[bold red]error:[/]", end=" ")
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
            return 1


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: we drain first."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answers = asyncio.Event()
        """Set once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answers.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(self, settings: ServeSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._stop = asyncio.Event()

    async def run(self) -> int:
        self._handle_signals()
        with contextlib.closing(self._bind()) as bound:
            starting = asyncio.create_task(self._start())
            if not await self._finishes_before_stop(starting):
                return 0
            engine, runtime = starting.result()
            try:
                return await self._serve(bound, engine, runtime)
            finally:
                await engine.close(ENGINE_GRACE_S)
                if self._settings.uds:
                    self._settings.uds.unlink(missing_ok=True)

    def _bind(self) -> socket.socket:
        if self._settings.uds:
            return bind_unix(self._settings.uds)
        return bind_tcp(self._settings.bind_host, self._settings.port)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            # A second signal: now. The engine process ends with us.
            os._exit(1)
        self._stop.set()

    async def _finishes_before_stop(self, task: asyncio.Task[Any]) -> bool:
        """True with the task done (its exception is the task's); False with it cancelled because of a signal."""
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return True
        task.cancel()
        await asyncio.wait([task])
        return False

    async def _start(self) -> tuple[LocalEngine, Runtime]:
        settings = self._settings
        if settings.enable_lora:
            self._print("--enable-lora is not needed: adapters are always on")
        with StartupDisplay(self._console) as display:
            display.show(STARTING, 0, 1)
            engine = await LocalEngine.start(settings.engine, display.show)
            display.show(STARTING, 1, 1)
            try:
                runtime = self._build_runtime(engine)
                await self._load_adapters(runtime, display)
            except BaseException:
                await engine.close(0)
                raise
        return engine, runtime

    def _build_runtime(self, engine: LocalEngine) -> Runtime:
        settings = self._settings
        if settings.chat_template is not None:
            engine.use_chat_template(settings.chat_template.read_text())
        try:
            settings.data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"--data-dir {settings.data_path} cannot be made: {error.strerror}") from error
        return build_runtime(engine, settings.serving, adapter_limits=_adapter_limits(settings.max_lora_rank))

    async def _load_adapters(self, runtime: Runtime, display: StartupDisplay) -> None:
        adapters = self._settings.adapters
        for done, adapter in enumerate(adapters):
            display.show("loading adapters", done, len(adapters))
            try:
                await runtime.adapters.add(adapter.name, adapter.path, follow_symlinks=True)
            except ServingError as error:
                raise StartError(f"adapter {adapter.name!r} from {adapter.path}: {error.message}") from error
        if adapters:
            display.show("loading adapters", len(adapters), len(adapters))

    async def _serve(self, bound: socket.socket, engine: LocalEngine, runtime: Runtime) -> int:
        http = _HttpServer(_http_config(runtime))
        _calm_garbage_collector()
        serving = asyncio.create_task(http.serve([bound]))
        await _first_of(http.answers.wait(), self._stop.wait(), serving)
        if not self._stop.is_set() and not serving.done():
            print(self._banner(bound, engine, runtime), flush=True)
            await _first_of(self._stop.wait(), engine.wait_dead(), serving)
        exit_code = await self._wind_down(engine, runtime)
        http.should_exit = True
        await serving
        return exit_code

    async def _wind_down(self, engine: LocalEngine, runtime: Runtime) -> int:
        """Let what runs finish, then stop the engine, so that whatever is left ends as aborted and not cut off."""
        if not self._stop.is_set():
            self._print(f"the server stops: {engine.error or 'HTTP ended'}")
            return 1
        runtime.lifecycle.begin_drain()
        if num_running := runtime.lifecycle.num_sequences:
            timeout_s = self._settings.shutdown_timeout
            self._print(f"finishing {num_running} sequences for up to {timeout_s:g} s; a second signal stops at once")
            if not await runtime.lifecycle.wait_idle(timeout_s):
                self._print(f"aborting {runtime.lifecycle.num_sequences} sequences")
        await engine.close(ENGINE_GRACE_S)
        return 0

    def _banner(self, bound: socket.socket, engine: LocalEngine, runtime: Runtime) -> Banner:
        settings = self._settings
        return Banner(
            base_url=base_url(bound),
            uds=settings.uds,
            needs_key=bool(settings.api_key),
            model_name=settings.model_names[0],
            model=engine.model,
            adapters=[adapter.name for adapter in runtime.registry.list()],
            data_dir=settings.data_path,
            is_demo=settings.is_demo,
        )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _adapter_limits(max_lora_rank: int | None) -> Limits:
    return DEFAULT_LIMITS if max_lora_rank is None else replace(DEFAULT_LIMITS, max_lora_rank=max_lora_rank)


def _calm_garbage_collector() -> None:
    """Large bodies make hundreds of thousands of objects, which Python would walk again and again.

    Decoding a body of 480 000 short lists held up the event loop for 250 ms before and 60 ms after; a message with
    the logprobs of 100 000 prompt tokens 530 ms and 80 ms (two busy cores of an EPYC).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


async def _first_of(*awaitables: Awaitable[Any]) -> None:
    """Returns when one of them is done; the coroutines among the others are cancelled, tasks are left alone."""
    waiting = {awaitable: asyncio.ensure_future(awaitable) for awaitable in awaitables}
    await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
    for awaitable, future in waiting.items():
        if awaitable is not future:
            future.cancel()


def _http_config(runtime: Runtime) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(runtime),
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=HTTP_GRACE_S,
    )

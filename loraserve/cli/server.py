"""Runs the server: engine, adapters, HTTP; then drains on SIGTERM. Exit code 0 = stopped on request, 1 = failed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import uvloop
from loraserve_adapters.limits import DEFAULT_LIMITS, Limits
from rich.console import Console

from loraserve.cli.banner import Banner
from loraserve.cli.listen import ListenError, base_url, bind_tcp, bind_unix
from loraserve.cli.serve_settings import ServeSettings
from loraserve.cli.start_error import StartError
from loraserve.cli.startup_display import StartupDisplay
from loraserve.serving.errors import ServingError
from loraserve.serving.local_engine import EngineStartFailedError, LocalEngine

if TYPE_CHECKING:
    from loraserve.api.app_context import AppContext
    from loraserve.cli.http_server import HttpServer
    from loraserve.control.declared import Declared

HTTP_MODULES = ("loraserve.cli.control_start", "loraserve.serving.runtime", "loraserve.cli.http_server")
"""What is needed once there is an engine."""
STARTING = "starting the engine"
ENGINE_GRACE_S = 10.0
"""An engine told to stop has this long before it is killed."""


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


class _Server:
    def __init__(self, settings: ServeSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._stop = asyncio.Event()

    async def run(self) -> int:
        self._handle_signals()
        with contextlib.closing(self._bind()) as bound:
            async with contextlib.AsyncExitStack() as opened:
                starting = asyncio.create_task(self._start(opened))
                if not await self._finishes_before_stop(starting):
                    return 0
                engine, context, http = starting.result()
                try:
                    return await self._serve(bound, engine, context, http)
                finally:
                    await engine.close(ENGINE_GRACE_S)
                    await context.calls.wait_settled()
                    await context.control.close()
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

    async def _start(self, opened: contextlib.AsyncExitStack) -> tuple[LocalEngine, AppContext, HttpServer]:
        """opened: what is to be closed last."""
        settings = self._settings
        if settings.enable_lora:
            self._print("--enable-lora is not needed: adapters are always on")
        with StartupDisplay(self._console) as display:
            display.show(STARTING, 0, 1)
            # One core imports torch in the engine's process, the other what serves HTTP in ours.
            starting = asyncio.create_task(LocalEngine.start(settings.engine, display.show))
            try:
                await asyncio.to_thread(_import_http)
                from loraserve.cli.control_start import opened_declared

                declared = await opened.enter_async_context(opened_declared(settings))
                engine = await starting
            except BaseException:
                await _abandon(starting)
                raise
            display.show(STARTING, 1, 1)
            try:
                return engine, *await self._build(engine, declared, display)
            except BaseException:
                await engine.close(0)
                raise

    async def _build(
        self, engine: LocalEngine, declared: Declared, display: StartupDisplay
    ) -> tuple[AppContext, HttpServer]:
        from loraserve.api.app_context import AppContext
        from loraserve.cli.control_start import publish_configured
        from loraserve.cli.http_server import HttpServer
        from loraserve.control.adapter_names import CatalogNames
        from loraserve.control.control_plane import build_control
        from loraserve.serving.runtime import build_runtime

        settings, limits = self._settings, _adapter_limits(self._settings.max_lora_rank)
        if settings.chat_template is not None:
            engine.use_chat_template(settings.chat_template.read_text())
        certified = settings.engine if settings.certificates else None
        control = build_control(declared, engine, limits, certified)
        try:
            # All that holds up the event loop comes before `start`: calls to Redis have a second.
            runtime = build_runtime(engine, settings.serving, CatalogNames(declared.catalog))
            control.observer.watch(runtime)
            context = AppContext.of(runtime, control)
            http = HttpServer(context)
            _calm_garbage_collector()
            await control.start()
            adapters = settings.adapters
            await publish_configured(
                control,
                adapters,
                engine.model.layout,
                limits,
                lambda num_done: display.show("loading adapters", num_done, len(adapters)),
            )
        except BaseException:
            await control.close()
            raise
        return context, http

    async def _serve(self, bound: socket.socket, engine: LocalEngine, context: AppContext, http: HttpServer) -> int:
        serving = asyncio.create_task(http.serve([bound]))
        await _first_of(http.answers.wait(), self._stop.wait(), serving)
        if not self._stop.is_set() and not serving.done():
            await context.control.observer.snapshots.listens_at(base_url(bound))
            login_token = await self._login_token(context)
            print(self._banner(bound, engine, context, login_token), flush=True)
            await _first_of(self._stop.wait(), engine.wait_dead(), serving)
        exit_code = await self._wind_down(engine, context)
        http.should_exit = True
        await serving
        return exit_code

    async def _wind_down(self, engine: LocalEngine, context: AppContext) -> int:
        """Let what runs finish, then stop the engine, so that whatever is left ends as aborted and not cut off."""
        if not self._stop.is_set():
            self._print(f"the server stops: {engine.error or 'HTTP ended'}")
            return 1
        lifecycle = context.runtime.lifecycle
        lifecycle.begin_drain()
        if num_running := lifecycle.num_sequences:
            timeout_s = self._settings.shutdown_timeout
            self._print(f"finishing {num_running} sequences for up to {timeout_s:g} s; a second signal stops at once")
            if not await lifecycle.wait_idle(timeout_s):
                self._print(f"aborting {lifecycle.num_sequences} sequences")
        await engine.close(ENGINE_GRACE_S)
        return 0

    async def _login_token(self, context: AppContext) -> str | None:
        """For the console, to whoever sits at a terminal of a server with keys. Never into a journal."""
        key_id = context.control.authenticator.newest_admin
        if key_id is None or self._settings.uds is not None or not sys.stdout.isatty():
            return None
        with contextlib.suppress(ServingError):
            return (await context.control.sessions.make_link(key_id, "server", "")).token
        return None

    def _banner(
        self, bound: socket.socket, engine: LocalEngine, context: AppContext, login_token: str | None
    ) -> Banner:
        settings = self._settings
        return Banner(
            base_url=base_url(bound),
            uds=settings.uds,
            login_token=login_token,
            needs_key=not context.control.authenticator.is_open,
            model_name=settings.model_names[0],
            model=engine.model,
            adapters=_names(context),
            data_dir=settings.data_path,
            is_demo=settings.is_demo,
        )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _names(context: AppContext) -> list[str]:
    """Of the adapters that requests without a key, or with that of the command line, can use."""
    from loraserve.control.principal import server_principal
    from loraserve.store.records import DEFAULT_TENANT

    visible = context.control.resolver.visible(server_principal(DEFAULT_TENANT, "server"))
    return [document.doc.name for document in visible]


def _import_http() -> None:
    for module in HTTP_MODULES:
        importlib.import_module(module)


async def _abandon(starting: asyncio.Task[LocalEngine]) -> None:
    """Whether it was ready or not."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close(0)


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

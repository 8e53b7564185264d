"""Runs the server: engine, adapters, HTTP; then drains. Exit code 0 = stopped by a signal, 1 = failed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console

from loraserve.cli.serve.banner import Banner, shown_names
from loraserve.cli.serve.listen import ListenError, base_url, bind_tcp, bind_unix, listen
from loraserve.cli.serve.open_files import raise_limit
from loraserve.cli.serve.server_start import StartedServer, start_server
from loraserve.cli.serve.settings import ServeSettings
from loraserve.cli.serve.start_error import StartError
from loraserve.serving.errors import ServingError
from loraserve.serving.process.local_engine import EngineStartFailedError, LocalEngine
from loraserve.serving.process.standard_streams import never_fail

if TYPE_CHECKING:
    from loraserve.api.app_context import AppContext
    from loraserve.store.records import VersionRecord

ENGINE_GRACE_S = 10.0
"""Time for the engine to stop before it is killed."""


def run_server(settings: ServeSettings) -> int:
    """Runs the server until it stops. Returns the exit code."""
    never_fail()
    console = Console(stderr=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            raise_limit()
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
        with contextlib.ExitStack() as sockets:
            bound = sockets.enter_context(contextlib.closing(self._bind()))
            metrics_bound = self._bind_metrics(sockets)
            if metrics_bound is not None and metrics_bound.getsockname() == bound.getsockname():
                raise ListenError("--port and --metrics-port are the same: choose another --metrics-port")
            async with contextlib.AsyncExitStack() as opened:
                starting = asyncio.create_task(start_server(self._settings, self._console, opened))
                if not await self._finishes_before_stop(starting):
                    return 0
                started = starting.result()
                try:
                    async with self._serving_metrics(metrics_bound, started.context):
                        return await self._serve(bound, started)
                finally:
                    await started.engine.close(ENGINE_GRACE_S)
                    await started.context.calls.wait_settled()
                    await started.context.control.close()
                    if self._settings.uds:
                        self._settings.uds.unlink(missing_ok=True)

    def _bind(self) -> socket.socket:
        if self._settings.uds:
            return bind_unix(self._settings.uds)
        return bind_tcp(self._settings.bind_host, self._settings.port)

    def _bind_metrics(self, sockets: contextlib.ExitStack) -> socket.socket | None:
        host, port = self._settings.metrics_bind_host, self._settings.metrics_port
        if port is None:
            return None
        bound = bind_tcp(host, port, options=("--metrics-host", "--metrics-port"))
        return sockets.enter_context(contextlib.closing(bound))

    @contextlib.asynccontextmanager
    async def _serving_metrics(self, bound: socket.socket | None, context: AppContext) -> AsyncGenerator[None]:
        if bound is None:
            yield
            return
        from loraserve.cli.serve.metrics_port import serving_metrics

        listen(bound, option="--metrics-port")
        async with serving_metrics(bound, context, self._settings.metrics_hosts):
            self._print(f"metrics without a key: {base_url(bound)}/metrics")
            yield

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            # Shell and system may both send SIGHUP when one terminal closes, so it never counts as a second signal.
            loop.add_signal_handler(signal.SIGHUP, self._stop.set)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            # A second signal stops at once. The engine process ends with this one.
            os._exit(1)
        self._stop.set()

    async def _finishes_before_stop(self, task: asyncio.Task[Any]) -> bool:
        """True: the task is done, perhaps with an exception. False: it was cancelled because of a signal."""
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return True
        task.cancel()
        await asyncio.wait([task])
        return False

    async def _serve(self, bound: socket.socket, started: StartedServer) -> int:
        engine, context, http = started.engine, started.context, started.http
        listen(bound)
        serving = asyncio.create_task(http.serve([bound]))
        await _first_of(http.answers.wait(), self._stop.wait(), serving)
        if not self._stop.is_set() and not serving.done():
            await context.control.observer.snapshots.listens_at(base_url(bound))
            login_token = await self._login_token(context)
            print(self._banner(bound, started, login_token), flush=True)
            await _first_of(self._stop.wait(), engine.wait_dead(), serving)
        exit_code = await self._wind_down(engine, context)
        http.should_exit = True
        await serving
        return exit_code

    async def _wind_down(self, engine: LocalEngine, context: AppContext) -> int:
        """Lets running sequences finish, then stops the engine, so that the rest end as aborted and are not cut off."""
        if not self._stop.is_set():
            self._print(f"the server stops: {engine.error or 'the HTTP server ended'}")
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
        """A console login for the user at the terminal of a server with keys. Never written to a journal."""
        key_id = context.control.authenticator.newest_admin
        if key_id is None or self._settings.uds is not None or not sys.stdout.isatty():
            return None
        with contextlib.suppress(ServingError):
            return (await context.control.sessions.make_link(key_id, "server", "")).token
        return None

    def _banner(self, bound: socket.socket, started: StartedServer, login_token: str | None) -> Banner:
        settings, context = self._settings, started.context
        adapters, missing_templates = _live_versions(context), _missing_templates(context)
        return Banner(
            base_url=base_url(bound),
            uds=settings.uds,
            open_to=None if settings.is_on_loopback else settings.bind_host,
            login_token=login_token,
            needs_key=not context.control.authenticator.is_open,
            model_name=settings.model_names[0],
            model=started.engine.model,
            adapters=[*adapters],
            particular=frozenset(
                name
                for name, version in adapters.items()
                if version.invocation_token_ids or version.classifier or name in missing_templates
            ),
            data_dir=settings.data_path,
            is_demo=settings.is_demo,
            notes=[*started.notes, *_notes_on_missing_templates(missing_templates)],
        )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _live_versions(context: AppContext) -> dict[str, VersionRecord]:
    """Live versions by name, of the adapters that requests without a key, or with one from --api-key, can use."""
    from loraserve.control.documents.adapter_edits import live_version
    from loraserve.control.tenancy.principal import server_principal
    from loraserve.store.records import DEFAULT_TENANT

    visible = context.control.resolver.visible(server_principal(DEFAULT_TENANT, "server"))
    versions = ((document.doc.name, live_version(document.doc)) for document in visible)
    return {name: version for name, version in versions if version is not None}


def _missing_templates(context: AppContext) -> dict[str, str]:
    """Chat templates that live adapters of any tenant name and this server does not have, by adapter label."""
    from loraserve.control.documents.adapter_edits import live_version
    from loraserve.control.names.labels import label_of

    known = {template.name for template in context.runtime.settings.adapter_chat_templates}
    docs = (document.doc for document in context.control.catalog.all_adapters())
    live = ((doc, live_version(doc)) for doc in docs if doc.enabled and doc.deleted_at is None)
    return {
        label_of(doc.tenant, doc.name): version.chat_template
        for doc, version in live
        if version is not None and context.control.adapters.fits(version)
        if version.chat_template is not None and version.chat_template not in known
    }


def _notes_on_missing_templates(missing: Mapping[str, str]) -> list[str]:
    """At most one note. missing: see `_missing_templates`."""
    if not missing:
        return []
    templates, adapters = shown_names(sorted({*missing.values()})), shown_names([*missing])
    return [f"--adapter-chat-templates does not define {templates}: chats with {adapters} are refused"]


async def _first_of(*awaitables: Awaitable[Any]) -> None:
    """Returns when one of them is done. Of the others, coroutines are cancelled and tasks are left alone."""
    waiting = {awaitable: asyncio.ensure_future(awaitable) for awaitable in awaitables}
    await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
    for awaitable, future in waiting.items():
        if awaitable is not future:
            future.cancel()

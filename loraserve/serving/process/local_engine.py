"""An engine in a child process, reached over a socket pair that only the two processes have."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

import msgspec

from loraserve.engine.config import EngineConfig
from loraserve.engine.malloc import with_huge_pages
from loraserve.engine.model_description import ModelDescription
from loraserve.engine.request import BegunPrompt, EngineRequest, EngineStats, SequenceOutput
from loraserve.serving.engine_client import AdapterLoadError, EngineDeadError, OnBegun, ignore_begun
from loraserve.serving.process.framing import FrameBuffer, encode_frame
from loraserve.serving.process.messages import (
    Abort,
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    AddRequest,
    EngineFailed,
    FromEngine,
    LoadAdapter,
    PromptsBegun,
    Ready,
    Shutdown,
    StartFailed,
    StartProgress,
    StepOutputs,
    ToEngine,
    UnloadAdapter,
)
from loraserve.serving.process.our_modules import module_command, python_environment
from loraserve.serving.process.socket_pairs import socket_pair

EXIT_WAIT_S = 5.0
"""An engine whose socket is closed has this long to exit before it is killed."""
REAP_EVERY_S = 0.01

ENGINE_COMMAND = module_command("loraserve.serving.process.engine_process")

OnProgress = Callable[[str, int, int], None]


class EngineStartFailedError(Exception):
    """The engine did not start; the message is for the operator."""


class _RequestStream:
    """Outputs of one request for its consumer. Steps not fetched yet are joined in one list, which is bounded by what
    the request can generate."""

    __slots__ = ("_arrival", "num_unfinished", "on_begun", "pending")

    def __init__(self, num_choices: int, on_begun: OnBegun) -> None:
        self.on_begun = on_begun
        self.pending: list[SequenceOutput] = []
        self.num_unfinished = num_choices
        """Choices whose last output has not arrived."""
        self._arrival: asyncio.Future[None] | None = None
        """The future that the consumer awaits."""

    def put(self, output: SequenceOutput) -> None:
        self.pending.append(output)
        if output.finish_reason is not None:
            self.num_unfinished -= 1
        self.wake()

    def take(self) -> list[SequenceOutput]:
        outputs, self.pending = self.pending, []
        return outputs

    def next_arrival(self) -> asyncio.Future[None]:
        """Completes at the next `put` or `wake`."""
        self._arrival = asyncio.get_running_loop().create_future()
        return self._arrival

    def wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class LocalEngine:
    """An `EngineClient`. Build it with `start`; call everything on the event loop that started it.

    NOTE: that loop must run on a long-lived thread (Linux kills the engine when the thread ends).
    """

    def __init__(self, process: subprocess.Popen[bytes], on_progress: OnProgress) -> None:
        self._process = process
        self._on_progress = on_progress
        self._transport: asyncio.WriteTransport | None = None
        self._streams: dict[str, _RequestStream] = {}
        self._loads: dict[str, list[asyncio.Future[None]]] = {}
        self._unloads: dict[str, list[asyncio.Future[None]]] = {}
        self._ready: asyncio.Future[ModelDescription] = asyncio.get_running_loop().create_future()
        self._model: ModelDescription | None = None
        """Set if it differs from what the engine sent."""
        self._dead = asyncio.Event()
        self._reaper: asyncio.Task[None] | None = None
        self._failure: str | None = None
        """The reason that the engine sent before it ended."""
        self._closing = False
        self._error: str | None = None
        self._stats = EngineStats()
        self._last_progress_s = time.monotonic()
        self._longest_step_s = 0.0

    @classmethod
    async def start(
        cls, config: EngineConfig, on_progress: OnProgress, command: Sequence[str] | None = None
    ) -> "LocalEngine":
        """Start the process and wait until the model is ready. Raises `EngineStartFailedError`."""
        ours, theirs = socket_pair()
        with theirs:
            engine = cls(_spawn(command or ENGINE_COMMAND, theirs.fileno()), on_progress)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: _EngineProtocol(engine), sock=ours)
            engine._write(config)
            await engine._ready
        except BaseException:
            await engine._kill()
            raise
        return engine

    @property
    def model(self) -> ModelDescription:
        return self._model or self._ready.result()

    def use_chat_template(self, source: str) -> None:
        """Replaces the model's own chat template."""
        self._model = dataclasses.replace(self.model, chat_template=source)

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def last_progress_s(self) -> float:
        return self._last_progress_s

    @property
    def longest_step_s(self) -> float:
        return self._longest_step_s

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_dead(self) -> None:
        """Returns once the process is gone, intentionally or not."""
        await self._dead.wait()

    async def generate(
        self, request: EngineRequest, on_begun: OnBegun = ignore_begun
    ) -> AsyncGenerator[list[SequenceOutput]]:
        """See `EngineClient.generate`. The first iteration sends the request to the engine."""
        request_id = request.request_id
        self._raise_if_dead()
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use")
        stream = self._streams[request_id] = _RequestStream(request.sampling.n, on_begun)
        self._write(AddRequest(request))
        try:
            while stream.pending or stream.num_unfinished > 0:
                if stream.pending:
                    yield stream.take()
                else:
                    self._raise_if_dead()
                    await stream.next_arrival()
        finally:
            del self._streams[request_id]
            if stream.num_unfinished > 0:
                self._write(Abort(request_id))

    def abort(self, request_id: str, index: int | None = None) -> None:
        if request_id in self._streams:
            self._write(Abort(request_id, index))

    async def load(self, digest: str, packed_path: str) -> None:
        await self._acknowledged(self._loads, digest, LoadAdapter(digest, packed_path))

    async def unload(self, digest: str) -> None:
        await self._acknowledged(self._unloads, digest, UnloadAdapter(digest))

    async def close(self, grace_s: float) -> None:
        """Stop the engine, killing it after grace_s. What still runs ends with finish_reason "abort"."""
        self._closing = True
        self._write(Shutdown())
        try:
            await asyncio.wait_for(self._dead.wait(), grace_s)
        except TimeoutError:
            await self._kill()

    async def _acknowledged(
        self, waiting: dict[str, list[asyncio.Future[None]]], digest: str, message: ToEngine
    ) -> None:
        """Concurrent callers for the same digest share one message and its answer."""
        self._raise_if_dead()
        answer = asyncio.get_running_loop().create_future()
        waiting.setdefault(digest, []).append(answer)
        if len(waiting[digest]) == 1:
            self._write(message)
        await answer

    def _write(self, message: ToEngine | EngineConfig) -> None:
        """Never blocks: what the engine has not read yet waits in the transport."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def _receive(self, message: FromEngine) -> None:
        before_s, self._last_progress_s = self._last_progress_s, time.monotonic()
        match message:
            case StepOutputs(outputs, stats):
                self._longest_step_s = max(self._longest_step_s, self._last_progress_s - before_s)
                if stats is not None:
                    self._stats = stats if stats.lists_residents else _with_residents_of(self._stats, stats)
                self._deliver(outputs)
            case PromptsBegun(prompts):
                self._notify_begun(prompts)
            case AdapterLoaded(digest):
                _settle(self._loads, digest, None)
            case AdapterFailed(digest, reason):
                _settle(self._loads, digest, AdapterLoadError(reason))
            case AdapterUnloaded(digest):
                _settle(self._unloads, digest, None)
            case StartProgress(phase, done, total):
                self._on_progress(phase, done, total)
            case Ready(model):
                self._ready.set_result(model)
            case StartFailed(reason) | EngineFailed(reason):
                self._failure = reason

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            # A consumer that left is no longer in the table; its last outputs crossed with the abort.
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    def _notify_begun(self, prompts: list[BegunPrompt]) -> None:
        for prompt in prompts:
            if (stream := self._streams.get(prompt.request_id)) is not None:
                stream.on_begun(prompt)

    def _end(self) -> None:
        """Call once the socket is closed or the process was killed."""
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        """NOTE: polls instead of using a thread, which the system may refuse to create."""
        kill_at_s, is_hung = time.monotonic() + EXIT_WAIT_S, False
        while (exit_code := self._process.poll()) is None:
            if time.monotonic() >= kill_at_s:
                is_hung = True
                self._process.kill()
            await asyncio.sleep(REAP_EVERY_S)
        self._die(f"the engine did not exit within {EXIT_WAIT_S} s and was killed" if is_hung else _ending(exit_code))

    def _die(self, ending: str) -> None:
        self._error = self._failure or ("the engine was shut down" if self._closing else ending)
        self._dead.set()
        for stream in self._streams.values():
            stream.wake()
        for waiting in (self._loads, self._unloads):
            for digest in list(waiting):
                _settle(waiting, digest, EngineDeadError(self._error))
        if not self._ready.done():
            self._ready.set_exception(EngineStartFailedError(self._error))

    async def _kill(self) -> None:
        self._process.kill()
        self._end()  # A transport that was closed while connecting does not report it.
        await self._dead.wait()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # Retrieved, so that asyncio does not report it as lost.

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise EngineDeadError(self._error)


class _EngineProtocol(asyncio.Protocol):
    """The event loop's side of the socket."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._engine._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        for payload in self._frames.payloads():
            self._engine._receive(self._decoder.decode(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._end()


def _spawn(command: Sequence[str], fd: int) -> subprocess.Popen[bytes]:
    """NOTE: never fork: the engine must not inherit our threads' locks or our event loop."""
    environment = {**with_huge_pages(os.environ), **python_environment()}
    return subprocess.Popen([*command, str(fd)], pass_fds=[fd], stdin=subprocess.DEVNULL, env=environment)


def _ending(exit_code: int) -> str:
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
    return f"the engine ended with {how}{hint}"


def _with_residents_of(listed: EngineStats, stats: EngineStats) -> EngineStats:
    return dataclasses.replace(
        stats,
        resident_adapters=listed.resident_adapters,
        resident_extents=listed.resident_extents,
        lists_residents=True,
    )


def _settle(waiting: dict[str, list[asyncio.Future[None]]], digest: str, error: Exception | None) -> None:
    for answer in waiting.pop(digest, []):
        if answer.done():
            continue
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

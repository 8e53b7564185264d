"""Our end of a fork server: sends it jobs and reads what the children forked for them write."""

import asyncio
import contextlib
import socket
import subprocess
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraserve.serving.process.socket_pairs import socket_pair

KILLED_WITHIN_S = 5.0


class ForkServerError(Exception):
    """The fork server ended, or did not even start, and the job with it."""


@dataclass(frozen=True, slots=True)
class Ended:
    returncode: int
    """As in `subprocess`: negative for a signal."""
    answer: bytes
    """The beginning of stdout."""
    errors: bytes
    """The beginning of stderr."""


class ForkedJobs:
    """Called on the event loop. Its fork server runs from the first job until `close` or garbage collection."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, max_answer_bytes: int, max_error_bytes: int
    ) -> None:
        """command: calls `fork_server.serve`. Output beyond the maxima is dropped."""
        self._command = command
        self._environment = environment
        self._max_answer_bytes = max_answer_bytes
        self._max_error_bytes = max_error_bytes
        self._end: weakref.finalize[..., Any] | None = None
        self._control: socket.socket | None = None
        self._on_their_way: deque[contextlib.ExitStack] = deque()
        """For each job whose sockets the fork server has not received yet: what closes them here, oldest first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that watches for the confirmation that it has them."""

    async def run(self, job: bytes) -> Ended:
        """Run a job in a child of its own; if cancelled, it is gone before this returns. Raises `ForkServerError`."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            pairs = [socket_pair() for _ in range(3)]
            ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            for end in ours:
                stack.enter_context(end).setblocking(False)
            with contextlib.ExitStack() as sent:
                for end in theirs:
                    sent.enter_context(end)
                control = self._start_child([end.fileno() for end in theirs])
                # NOTE: on macOS, a socket that its sender closes before it is received may arrive closed.
                self._on_their_way.append(sent.pop_all())
                self._loop = loop
                loop.add_reader(control, self._close_received, control)
            job_socket, error_socket, life = ours
            try:
                _, answer, errors = await asyncio.gather(
                    _send(loop, job_socket, job),
                    _read(loop, job_socket, self._max_answer_bytes),
                    _read(loop, error_socket, self._max_error_bytes),
                )
                status = await _read(loop, life, 16)
            except BaseException:
                await self._kill(loop, life)
                raise
        if not status:
            raise ForkServerError(f"{' '.join(self._command)} ended")
        return Ended(int(status), answer, errors)

    def close(self) -> None:
        """Ends the fork server and all children; blocks until it is gone, which takes milliseconds."""
        if (end := self._let_go()) is not None:
            end()

    async def wait_closed(self) -> None:
        """As `close`, but the waiting is done in a thread."""
        if (end := self._let_go()) is not None:
            await asyncio.to_thread(end)

    def _let_go(self) -> Callable[[], Any] | None:
        """Give up the fork server; returns the function that ends it."""
        if self._control is not None and self._on_their_way:
            self._close_ends(self._control, len(self._on_their_way))
        end, self._end, self._control = self._end, None, None
        return end

    def _start_child(self, descriptors: Sequence[int]) -> socket.socket:
        """The control socket over which they were sent."""
        try:
            return self._send_descriptors(descriptors)
        except OSError:
            # It ended since the last job.
            self.close()
            try:
                return self._send_descriptors(descriptors)
            except OSError as error:
                raise ForkServerError(f"{' '.join(self._command)} cannot be started: {error}") from error

    def _send_descriptors(self, descriptors: Sequence[int]) -> socket.socket:
        if self._control is None:
            self._control = self._start_server()
        socket.send_fds(self._control, [b"1"], descriptors)
        return self._control

    def _close_received(self, control: socket.socket) -> None:
        """Called when there is something to read: a byte for each job whose sockets were received, or the end."""
        try:
            num_received = len(control.recv(len(self._on_their_way), socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except ConnectionError:
            num_received = 0
        self._close_ends(control, num_received or len(self._on_their_way))

    def _close_ends(self, control: socket.socket, num_jobs: int) -> None:
        for _ in range(num_jobs):
            self._on_their_way.popleft().close()
        if self._loop is not None and not self._on_their_way:
            self._loop.remove_reader(control)

    def _start_server(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as failed:
            failed.enter_context(ours)
            with theirs:
                process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=self._environment,
                    # Ctrl-C in a terminal must reach only the server, which decides what still gets done.
                    start_new_session=True,
                )
            failed.pop_all()
        self._end = weakref.finalize(self, _end_server, process, ours)
        return ours

    async def _kill(self, loop: asyncio.AbstractEventLoop, life: socket.socket) -> None:
        """Returns when the child is gone; if it cannot be ended alone, with the whole fork server."""
        with contextlib.suppress(OSError):
            life.shutdown(socket.SHUT_WR)
        try:
            async with asyncio.timeout(KILLED_WITHIN_S):
                await _read(loop, life, 16)
        except TimeoutError:
            await self.wait_closed()


def _end_server(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(KILLED_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _send(loop: asyncio.AbstractEventLoop, target: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(target, data)
        target.shutdown(socket.SHUT_WR)


async def _read(loop: asyncio.AbstractEventLoop, source: socket.socket, limit: int) -> bytes:
    """Reads to the end, keeping the first `limit` bytes."""
    kept = bytearray()
    with contextlib.suppress(ConnectionError):
        while block := await loop.sock_recv(source, 1 << 16):
            kept += block[: limit - len(kept)]
    return bytes(kept)

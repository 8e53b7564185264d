"""The Redis-compatible server of one data directory, run by the process that holds the directory's lock."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from loraserve.live import die_with_parent
from loraserve.live.append_only_file import AppendOnlyFile, send_command
from loraserve.live.errors import LiveServerError
from loraserve.live.server_binary import find_server_binary
from loraserve.live.server_place import ServerPlace, prepare_place, set_data_aside
from loraserve.store.locks import lock, try_lock

START_S = 10.0
STOP_S = 10.0
POLL_S = 0.01
TEND_EVERY_S = 0.2
MAX_FAILED_STARTS = 2
LONGEST_PAUSE_S = 5.0

logger = logging.getLogger(__name__)


class PrivateServer:
    """`async with PrivateServer(data_dir) as server:` starts the server, or joins the one that another process runs.

    The server is restarted if it dies. It ends with the process that runs it, and another process takes over. The
    server inherits the lock `owner.lock`, so no process gets it before the old server is gone. It does not inherit
    `runner.lock`, so a joining process can tell that a server that still answers is about to end. `url` stays the same.
    NOTE: enter it on the main thread, which must outlive it.
    """

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._place: ServerPlace | None = None
        self._lock_fd: int | None = None
        """Set while this process runs the server."""
        self._runner_fd: int | None = None
        """Likewise, for the lock that the server does not inherit."""
        self._process: subprocess.Popen[bytes] | None = None
        self._tending: asyncio.Task[None] | None = None
        self._binary: Path | None = None
        self._num_failed_starts = 0
        """Consecutive."""

    @property
    def place(self) -> ServerPlace:
        if self._place is None:
            raise RuntimeError("the private server is not entered")
        return self._place

    @property
    def url(self) -> str:
        return self.place.url

    @property
    def is_owner(self) -> bool:
        return self._lock_fd is not None

    async def __aenter__(self) -> Self:
        """When this returns, the server answers. Raises LiveServerError."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the private server must be started on the main thread: it ends with the thread")
        self._place = prepare_place(self._data_dir)
        try:
            await self._start_or_join()
        except BaseException:
            await self._stop()
            raise
        self._tending = asyncio.create_task(self._tend_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops the server if this process runs it."""
        if self._tending is not None:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
        await self._stop()

    async def _start_or_join(self) -> None:
        deadline = time.monotonic() + START_S
        self._keep_up()
        while not (await _answers(self.place.socket) and self._has_runner()):
            if self._num_failed_starts > MAX_FAILED_STARTS:
                raise LiveServerError(f"the private server does not start: {self._last_log_line()}")
            if time.monotonic() > deadline:
                runner = "this process" if self.is_owner else "another process"
                raise LiveServerError(
                    f"the private server, run by {runner}, does not answer on {self.place.socket} "
                    f"within {START_S:g} s; its log is {self.place.log}"
                )
            await asyncio.sleep(POLL_S)
            self._keep_up()

    async def _tend_forever(self) -> None:
        file = AppendOnlyFile(self.place.socket)
        while True:
            await asyncio.sleep(max(TEND_EVERY_S, min(self._num_failed_starts, LONGEST_PAUSE_S)))
            try:
                self._keep_up()
                if self._num_failed_starts and await _answers(self.place.socket):
                    self._num_failed_starts = 0
            except (OSError, LiveServerError) as error:
                logger.error("the private server cannot be started: %s", error)
            if self.is_owner:
                with contextlib.suppress(OSError, EOFError):
                    await file.watch()

    def _keep_up(self) -> None:
        """Takes over or restarts the server if necessary."""
        if self._lock_fd is None:
            self._lock_fd = try_lock(self.place.lock)
            if self._lock_fd is not None:
                # Waits only for processes that test whether it is taken (`_has_runner`), which takes microseconds.
                self._runner_fd = lock(self.place.runner_lock)
                self._process = self._launch(self._lock_fd)
        elif self._process is None or self._process.poll() is not None:
            self._judge_end(self._process)
            self._process = self._launch(self._lock_fd)

    def _judge_end(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is None:
            return
        _close_stdin(process)
        if process.returncode <= 0:
            return  # It was stopped or killed, or exited normally: not a failed start.
        self._num_failed_starts += 1
        if self._num_failed_starts == MAX_FAILED_STARTS:
            # The data is damaged or from another program. It can be rebuilt, so an empty server is better than none.
            set_data_aside(self.place)

    def _has_runner(self) -> bool:
        """False: the process that ran the server is gone, which the server takes up to 100 ms to notice."""
        if self.is_owner or not self.place.runner_lock.exists():  # The latter: run by a release without this lock.
            return True
        fd = try_lock(self.place.runner_lock)
        if fd is not None:
            os.close(fd)
        return fd is None

    def _launch(self, lock_fd: int) -> subprocess.Popen[bytes]:
        if self._binary is None:
            self._binary = find_server_binary()
        options = {
            "port": "0",
            "unixsocket": str(self.place.socket),
            "unixsocketperm": "700",
            "dir": str(self.place.folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "logfile": str(self.place.log),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), str(self._binary), *arguments],
            stdin=subprocess.PIPE,  # Closes when this process ends; `die_with_parent` needs it outside Linux.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock_fd,),
            # A terminal's Ctrl-C must not end it while requests drain.
            start_new_session=True,
        )

    def _last_log_line(self) -> str:
        try:
            lines = self.place.log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return f"{lines[-1] if lines else 'it wrote no log'} ({self.place.log})"

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if self._runner_fd is not None:
            os.close(self._runner_fd)
            self._runner_fd = None
        if process is not None:
            process.terminate()
            deadline = time.monotonic() + STOP_S
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            process.kill()
            process.wait()
            _close_stdin(process)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


async def _answers(path: Path) -> bool:
    """False also while the server is still loading its data."""
    try:
        return await send_command(path, "PING") == b"+PONG\r\n"
    except OSError:
        return False

"""Processes forked from one that has imported what they need; used like a `subprocess.Popen`."""

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TextIO

from loraserve.control.ingest.fork_server import RECEIVED

END_S = 30.0


@dataclass(slots=True)
class ForkedProcess:
    pid: int
    stdout: TextIO
    """Also has its stderr."""
    life: socket.socket
    """Reports how it ended; the process ends when we close this."""
    returncode: int | None = None

    def poll(self) -> int | None:
        """None while it runs."""
        if self.returncode is None and select.select([self.life], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.life], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
            with self.life:
                status = self.life.recv(16)
            assert status, f"the fork server of process {self.pid} ended"
            self.returncode = int(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its fork server is about to report how
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ProcessForks:
    """A fork server. It ends with all its processes when closed, or when this process is gone."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """command: must call `fork_server.serve` for children that read a line of JSON and write their process id."""
        self.environment = dict(environment)
        self.directory = os.getcwd()
        self._on_hangup = signal.getsignal(signal.SIGHUP)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs, stdout=subprocess.DEVNULL, env=self.environment, cwd=self.directory
            )

    def can_start_in(self, environment: Mapping[str, str]) -> bool:
        """Whether its children fit: they have the environment, the working directory and the handling of SIGHUP (which
        `nohup` ignores) that it was started with."""
        is_same_place = dict(environment) == self.environment and os.getcwd() == self.directory
        return is_same_place and signal.getsignal(signal.SIGHUP) == self._on_hangup

    def start(self, arguments: Sequence[str]) -> ForkedProcess:
        (job, their_job), (life, their_life) = socket.socketpair(), socket.socketpair()
        output, their_output = os.pipe()
        with job, ExitStack() as theirs:
            theirs.enter_context(their_job)
            theirs.enter_context(their_life)
            theirs.callback(os.close, their_output)
            socket.send_fds(self._control, [b"1"], [their_job.fileno(), their_output, their_life.fileno()])
            assert self._control.recv(1) == RECEIVED, "the fork server ended"
            theirs.close()
            job.sendall(json.dumps(arguments).encode() + b"\n")
            pid = int(job.makefile().readline())
        return ForkedProcess(pid, os.fdopen(output), life)

    def close(self) -> None:
        self._control.close()
        self._process.wait(END_S)

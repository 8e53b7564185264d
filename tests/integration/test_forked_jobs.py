"""One forked child per job: what it inherits, what it returns, and what it leaves behind."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from loraserve.control.ingest.forked_jobs import Ended, ForkedJobs, ForkServerError
from tests.support.fork_servers import children_of, fork_server_of, our_fork_servers
from tests.support.small_sockets import MACOS_BYTES, small_pair

UPPER = "import sys; sys.stdout.write(sys.stdin.read().upper())"
HANG = "import time; time.sleep(600)"


@contextmanager
def jobs_of(script: str, before: str = "", **environment: str) -> Iterator[ForkedJobs]:
    jobs = forked_jobs(fork_server_of(script, before), **environment)
    try:
        yield jobs
    finally:
        jobs.close()


def forked_jobs(command: tuple[str, ...], **environment: str) -> ForkedJobs:
    return ForkedJobs(
        command, {"PATH": os.environ["PATH"], **environment}, max_answer_bytes=1 << 20, max_error_bytes=100
    )


def servers() -> set[int]:
    return set(our_fork_servers("fork_server"))


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def the_server(other_than: int = 0) -> int:
    """Waits for it, because its command is not known right after it was started."""
    while not (found := servers() - {other_than}):
        await asyncio.sleep(0.005)
    (server,) = found
    return server


async def child_of(server: int) -> int:
    while not (children := children_of(server)):
        await asyncio.sleep(0.005)
    return children[0]


def test_a_child_gets_the_job_and_its_output_is_returned() -> None:
    with jobs_of(UPPER) as jobs:
        assert asyncio.run(jobs.run(b"select 1")) == Ended(0, b"SELECT 1", b"")
        large = b"a" * 5_000_000
        ended = asyncio.run(jobs.run(large))
    assert ended == Ended(0, b"A" * (1 << 20), b"")


@pytest.mark.parametrize(
    ("script", "returncode", "errors"),
    [
        ("raise SystemExit(3)", 3, b""),
        ("raise SystemExit('no')", 1, b""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, b""),
        ("import sys; sys.stderr.write('x' * 5000)", 0, b"x" * 100),
        ("import sys; sys.stdin.close(); sys.stdout.close()", 0, b""),
    ],
)
def test_a_childs_exit_status_and_errors_are_returned(script: str, returncode: int, errors: bytes) -> None:
    with jobs_of(script) as jobs:
        ended = asyncio.run(jobs.run(b"a" * 1_000_000))
    assert (ended.returncode, ended.errors) == (returncode, errors)


def test_an_exception_in_the_child_is_reported_on_stderr() -> None:
    with jobs_of("import sys; sys.stdin.read(); raise ValueError('forty-two')") as jobs:
        jobs._max_error_bytes = 10_000
        ended = asyncio.run(jobs.run(b""))
    assert ended.returncode == 1
    assert b"ValueError: forty-two" in ended.errors


@pytest.mark.parametrize("system", ["", "sys.platform = 'darwin'; del os.closerange"], ids=["ours", "macos"])
def test_a_child_has_only_its_own_sockets_and_no_state_of_earlier_children(system: str) -> None:
    script = """
import builtins, json, os, sys
job = sys.stdin.read()
seen = getattr(builtins, "seen", [])
builtins.seen = [*seen, job]
places = {int(place): os.readlink(f"/proc/self/fd/{place}") for place in os.listdir("/proc/self/fd")
          if os.path.lexists(f"/proc/self/fd/{place}")}
json.dump({"pid": os.getpid(), "seen": seen, "places": places, "environment": dict(os.environ)}, sys.stdout)
"""

    async def run(jobs: ForkedJobs) -> list[Ended]:
        return await asyncio.gather(*(jobs.run(f"job {i}".encode()) for i in range(8)))

    with jobs_of(script, system, GIVEN="yes") as jobs:
        answers = [json.loads(ended.answer) for ended in asyncio.run(run(jobs))]
    assert len({answer["pid"] for answer in answers}) == 8
    for answer in answers:
        assert answer["seen"] == []
        assert answer["environment"]["GIVEN"] == "yes"
        assert "HOME" not in answer["environment"]
        places = answer["places"]
        assert set(places) == {"0", "1", "2", "3"}
        assert places["0"] == places["1"] != places["2"]
        assert places["3"].startswith("pipe:")


def test_a_childs_socket_buffers_exceed_the_macos_default(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import os, socket, sys
for descriptor in (1, 2):
    with socket.socket(fileno=os.dup(descriptor)) as end:
        print(end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
"""
    with jobs_of(script) as jobs:
        monkeypatch.setattr(socket, "socketpair", small_pair)
        ended = asyncio.run(jobs.run(b""))
    assert min(map(int, ended.answer.split())) > 2 * MACOS_BYTES


def test_a_cancelled_jobs_child_is_gone_at_once_and_the_fork_server_continues() -> None:
    script = """
import os, sys, time
if sys.stdin.read() == "hang":
    time.sleep(600)
sys.stdout.write("done")
"""

    async def run(jobs: ForkedJobs) -> None:
        assert (await jobs.run(b"")).answer == b"done"
        server = await the_server()
        hanging = asyncio.create_task(jobs.run(b"hang"))
        child = await child_of(server)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert not is_running(child)
        assert (await jobs.run(b"")).answer == b"done"
        assert servers() == {server}

    with jobs_of(script) as jobs:
        asyncio.run(run(jobs))


def open_sockets() -> set[str]:
    """In this process."""
    places = (f"/proc/self/fd/{place}" for place in os.listdir("/proc/self/fd"))
    return {found for place in places if os.path.lexists(place) and (found := os.readlink(place)).startswith("socket:")}


def test_sockets_stay_open_until_the_fork_server_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: set[str] = set()
    send_fds = socket.send_fds

    def recorded(control: socket.socket, buffers: list[bytes], descriptors: list[int]) -> int:
        sent.update(os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors)
        return send_fds(control, buffers, descriptors)

    async def run(jobs: ForkedJobs) -> None:
        await jobs.run(b"")
        server = await the_server()
        before = open_sockets()
        monkeypatch.setattr(socket, "send_fds", recorded)
        os.kill(server, signal.SIGSTOP)
        running = [asyncio.create_task(jobs.run(b"hang")) for _ in range(3)]
        while len(sent) < 9:
            await asyncio.sleep(0.005)
        assert sent <= open_sockets()
        os.kill(server, signal.SIGCONT)
        while sent & open_sockets():
            await asyncio.sleep(0.005)
        assert not any(task.done() for task in running)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert open_sockets() == before

    with jobs_of("import sys, time; sys.stdin.read() and time.sleep(600)") as jobs:
        asyncio.run(run(jobs))


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGCONT], ids=["it dies", "the job is not wanted any more"])
def test_sockets_that_the_fork_server_never_received_are_closed(ending: signal.Signals) -> None:
    async def run(jobs: ForkedJobs) -> None:
        await jobs.run(b"")
        server = await the_server()
        before = open_sockets()
        os.kill(server, signal.SIGSTOP)
        running = [asyncio.create_task(jobs.run(b"")) for _ in range(3)]
        await asyncio.sleep(0.05)
        if ending == signal.SIGCONT:
            for task in running:
                task.cancel()
            await asyncio.sleep(0.05)
        os.kill(server, ending)
        done, _ = await asyncio.wait(running)
        expected = asyncio.CancelledError if ending == signal.SIGCONT else ForkServerError
        for task in done:
            with pytest.raises(expected):
                await task
        assert open_sockets() == before
        assert (await jobs.run(b"")).returncode == 0

    with jobs_of(UPPER) as jobs:
        asyncio.run(run(jobs))


def test_jobs_fail_if_their_fork_server_dies_and_the_next_job_gets_another() -> None:
    async def run(jobs: ForkedJobs) -> None:
        hanging = asyncio.create_task(jobs.run(b"hang"))
        await asyncio.sleep(0)
        server = await the_server()
        child = await child_of(server)
        os.kill(server, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        with pytest.raises(ForkServerError, match="ended"):
            await hanging
        wait_until_gone(server)
        for _ in range(3):
            hanging = asyncio.create_task(jobs.run(b"hang"))
            await asyncio.sleep(0)
            another = await the_server(other_than=server)
            await child_of(another)
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging

    with jobs_of(HANG) as jobs:
        asyncio.run(run(jobs))
    assert servers() == set()


def test_a_fork_server_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.control.ingest.forked_jobs.KILLED_WITHIN_S", 0.2)

    async def run(jobs: ForkedJobs) -> None:
        assert (await jobs.run(b"a")).answer == b"A"
        server = await the_server()
        os.kill(server, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await jobs.run(b"a")
        assert servers() == set()
        assert (await jobs.run(b"a")).answer == b"A"

    with jobs_of(UPPER) as jobs:
        asyncio.run(run(jobs))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((sys.executable, "-c", "raise SystemExit(1)"), "ended"),
        (("/nowhere/python",), "cannot be started"),
    ],
)
def test_a_fork_server_that_cannot_run_is_reported(command: tuple[str, ...], reason: str) -> None:
    jobs = forked_jobs(command)
    for _ in range(2):
        with pytest.raises(ForkServerError, match=reason):
            asyncio.run(jobs.run(b"a"))
    jobs.close()


def test_close_and_garbage_collection_end_the_fork_server_and_its_children() -> None:
    async def run(jobs: ForkedJobs) -> tuple[int, int, asyncio.Task[Ended]]:
        task = asyncio.create_task(jobs.run(b""))
        await asyncio.sleep(0)
        server = await the_server()
        return server, await child_of(server), task

    async def closed(jobs: ForkedJobs) -> None:
        server, child, task = await run(jobs)
        jobs.close()
        with pytest.raises(ForkServerError):
            await task
        assert not is_running(server)
        wait_until_gone(child)
        jobs.close()

    asyncio.run(closed(forked_jobs(fork_server_of(HANG))))
    dropped = forked_jobs(fork_server_of(UPPER))
    asyncio.run(dropped.run(b""))
    server = asyncio.run(the_server())
    del dropped
    gc.collect()
    assert not is_running(server)


def test_no_process_is_left_if_the_process_that_uses_the_fork_server_is_killed() -> None:
    program = f"""
import asyncio, os, sys
from loraserve.control.ingest.forked_jobs import ForkedJobs
jobs = ForkedJobs({fork_server_of(HANG)!r}, dict(os.environ), max_answer_bytes=1, max_error_bytes=1)
asyncio.run(jobs.run(b""))
"""
    with subprocess.Popen([sys.executable, "-c", program]) as user:
        deadline = time.monotonic() + 30
        server = child = 0
        while not child:
            assert time.monotonic() < deadline
            server = next(iter(children_of(user.pid)), 0)
            child = next(iter(children_of(server)), 0) if server else 0
            time.sleep(0.01)
        user.kill()
    wait_until_gone(server)
    wait_until_gone(child)

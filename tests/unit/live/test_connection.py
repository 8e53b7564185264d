"""Against a real server, through a proxy that can hold back replies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from loraserve.live.connection import NUM_LINKS, LiveConnection
from loraserve.live.errors import LiveRestartedError, LiveUnavailableError, LiveUrlError
from loraserve.live.script_loader import Script, load_script
from tests.support.clock import Clock
from tests.support.delay_proxy import DelayProxy, delay_proxy
from tests.support.valkey import Valkey, valkey

__all__ = ["valkey"]

ECHO = Script("return {ARGV[1]}", "f" * 40)
"""Never cached under this digest, so its full text is sent."""


def through_proxy(
    valkey: Valkey,
    folder: Path,
    check: Callable[[LiveConnection, DelayProxy], Awaitable[None]],
    max_links: int = 16,
) -> None:
    async def run() -> None:
        async with delay_proxy(folder, valkey.socket_path) as proxy:
            connection = LiveConnection(proxy.url, timeout_s=5.0, max_links=max_links)
            try:
                await check(connection, proxy)
            finally:
                await connection.close()

    asyncio.run(run())


@contextmanager
def impatient(connection: LiveConnection) -> Iterator[None]:
    """Calls inside it wait only 0.1 s for an answer, which a busy machine may need for one that nobody holds back."""
    patient_s, connection._timeout_s = connection._timeout_s, 0.1
    yield
    connection._timeout_s = patient_s


def directly(valkey: Valkey, check: Callable[[LiveConnection], Awaitable[None]]) -> None:
    async def run() -> None:
        connection = LiveConnection(valkey.url, timeout_s=5.0)
        try:
            await check(connection)
        finally:
            await connection.close()

    asyncio.run(run())


@pytest.mark.parametrize("options", ["", "?protocol=3"])
def test_a_server_is_reached_over_tcp(valkey: Valkey, tmp_path: Path, options: str) -> None:
    async def run() -> None:
        async with (
            delay_proxy(tmp_path, valkey.socket_path) as proxy,
            await asyncio.start_server(proxy.serve_client, "127.0.0.1", 0) as tcp,
        ):
            port = tcp.sockets[0].getsockname()[1]
            connection = LiveConnection(f"redis://127.0.0.1:{port}/0{options}", timeout_s=5.0)
            try:
                assert await connection.call("PING") == b"PONG"
            finally:
                await connection.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    ["http://host", "host:6379", "redis://:secret/word@host:6379", "redis://host/0?secret=1", "unix:///s?db=secret"],
)
def test_an_invalid_redis_url_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(LiveUrlError) as raised:
        LiveConnection(url)
    assert "secret" not in str(raised.value)


def test_the_reply_to_a_cancelled_call_is_never_read_by_the_next_call(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        await connection.call("SET", "mine", "secret of one")
        await connection.call("SET", "yours", "value of another")
        proxy.flowing.clear()
        call = asyncio.create_task(connection.call("GET", "mine"))
        await proxy.until_held()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        proxy.flowing.set()
        for _ in range(20):
            assert await connection.call("GET", "yours") == b"value of another"

    # One link, so the next call would use the same socket.
    through_proxy(valkey, tmp_path, check, max_links=1)


def test_a_call_cancelled_while_connecting_does_not_affect_later_calls(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        proxy.flowing.clear()
        call = asyncio.create_task(connection.call("PING"))
        await proxy.until_held()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        proxy.flowing.set()
        assert await connection.call("ECHO", "hello") == b"hello"
        assert await connection.call("ECHO", "again") == b"again"

    through_proxy(valkey, tmp_path, check, max_links=1)


def test_calls_cancelled_at_random_moments_never_mix_up_replies(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        async def caller(index: int) -> int:
            num_answered = 0
            for turn in range(30):
                text = f"{index}-{turn}"
                call = asyncio.create_task(connection.call("ECHO", text))
                for _ in range((index * 7 + turn * 5) % 23):
                    await asyncio.sleep(0)
                if turn % 3:
                    call.cancel()
                try:
                    assert await call == text.encode()
                    num_answered += 1
                except asyncio.CancelledError:
                    pass
            return num_answered

        answered = await asyncio.gather(*(caller(index) for index in range(12)))
        assert min(answered) >= 10

    through_proxy(valkey, tmp_path, check, max_links=3)


def test_a_reply_after_the_timeout_is_discarded(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        clock = Clock()
        connection._breaker.clock = clock
        await connection.call("PING")
        proxy.flowing.clear()
        with impatient(connection), pytest.raises(LiveUnavailableError, match="no answer from Redis within 100 ms"):
            await connection.call("ECHO", "late")
        proxy.flowing.set()
        clock.now += 1
        assert await connection.call("ECHO", "next") == b"next"

    through_proxy(valkey, tmp_path, check, max_links=1)


def test_waiting_for_a_free_link_does_not_count_towards_the_timeout(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        proxy.flowing.clear()
        ahead = asyncio.create_task(connection.call("ECHO", "ahead"))
        await proxy.until_held()
        with impatient(connection):
            waiting = asyncio.create_task(connection.call("ECHO", "waiting"))
            await asyncio.wait([waiting], timeout=0.2)
        proxy.flowing.set()
        assert await asyncio.gather(ahead, waiting) == [b"ahead", b"waiting"]
        assert connection._breaker.down_since is None

    through_proxy(valkey, tmp_path, check, max_links=1)


def test_a_call_that_waits_too_long_for_a_link_fails_without_an_outage(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        connection._wait_s = 0.05
        proxy.flowing.clear()
        ahead = asyncio.create_task(connection.call("ECHO", "ahead"))
        await proxy.until_held()
        with pytest.raises(LiveUnavailableError, match=r"0.05 s of calls to Redis are waiting"):
            await connection.call("ECHO", "late")
        proxy.flowing.set()
        assert await ahead == b"ahead"
        assert connection._breaker.down_since is None
        assert await connection.call("ECHO", "next") == b"next"

    through_proxy(valkey, tmp_path, check, max_links=1)


def test_calls_that_wait_for_a_link_fail_with_the_first_that_times_out(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        connection._breaker.clock = Clock()
        await asyncio.gather(connection.call("PING"), connection.call("PING"))
        proxy.flowing.clear()
        with impatient(connection):
            calls = [asyncio.create_task(connection.call("PING")) for _ in range(200)]
            await proxy.until_held(2)
            replies = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(reply) for reply in replies} == {LiveUnavailableError}
        assert proxy.num_held == 2, "a waiting call was sent to a server that does not answer"

    through_proxy(valkey, tmp_path, check, max_links=2)


def test_a_call_cancelled_while_it_waits_for_a_link_leaves_its_place_to_the_next(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        proxy.flowing.clear()
        ahead = asyncio.create_task(connection.call("ECHO", "ahead"))
        await proxy.until_held()
        cancelled, late, next_one = [asyncio.create_task(connection.call("ECHO", str(number))) for number in range(3)]
        await asyncio.sleep(0)
        cancelled.cancel()
        proxy.flowing.set()
        assert await ahead == b"ahead"
        late.cancel()  # when its place may be free already
        assert await next_one == b"2"
        outcomes = await asyncio.gather(cancelled, late, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
        assert not connection._places.locked()

    through_proxy(valkey, tmp_path, check, max_links=1)


def test_more_callers_than_links_wait_their_turn(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        texts = [str(index) for index in range(200)]
        replies = await asyncio.gather(*(connection.call("ECHO", text) for text in texts))
        assert replies == [text.encode() for text in texts]
        assert proxy.num_connections == 4

    through_proxy(valkey, tmp_path, check, max_links=4)


def test_after_a_failure_calls_fail_at_once_until_the_next_probe(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        connection._breaker.clock = Clock()
        await connection.call("PING")
        proxy.flowing.clear()
        with impatient(connection), pytest.raises(LiveUnavailableError):
            await connection.call("PING")
        with pytest.raises(LiveUnavailableError) as refused:
            connection.call("PING").send(None)  # fails without waiting for anything
        assert 0 < refused.value.retry_after_s <= 1
        assert connection.up_since is None

    through_proxy(valkey, tmp_path, check)


def test_a_successful_probe_lets_all_calls_through_again(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        clock = Clock()
        connection._breaker.clock = clock
        proxy.flowing.clear()
        with impatient(connection), pytest.raises(LiveUnavailableError):
            await connection.call("PING")
        proxy.flowing.set()
        clock.now += 1
        replies = [await connection.call("PING") for _ in range(3)]
        assert replies == [b"PONG"] * 3
        assert connection.up_since is not None

    through_proxy(valkey, tmp_path, check)


def test_an_error_reply_is_raised_and_leaves_the_link_usable(valkey: Valkey, tmp_path: Path) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        await connection.call("SET", "text", "x")
        with pytest.raises(LiveUnavailableError, match=r"Redis refused: .*wrong kind of value"):
            await connection.call_many([["ECHO", "a"], ["HGET", "text", "field"], ["ECHO", "b"]])
        assert await connection.call("ECHO", "c") == b"c"
        assert proxy.num_connections == 1

    through_proxy(valkey, tmp_path, check, max_links=1)


def test_refused_commands_are_logged_once_and_not_for_each_call(
    valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    """The log is the only place that shows the reason: the server answers, so it does not count as unavailable."""

    async def check(connection: LiveConnection) -> None:
        assert valkey.command("CONFIG", "SET", "maxmemory", "1") == "+OK\r\n"
        for _ in range(3):
            with pytest.raises(LiveUnavailableError, match=r"Redis refused: .*maxmemory"):
                await connection.call("SET", "name", "value")
            with pytest.raises(LiveUnavailableError, match=r"Redis refused: .*maxmemory"):
                await connection.run_script(Script("return redis.call('SET', 'name', 'value')", "e" * 40), [], [])

    directly(valkey, check)
    (said,) = caplog.messages
    assert said.startswith("Redis answers, but refuses commands: ")
    assert "maxmemory" in said


def test_idle_links_to_a_restarted_server_are_replaced_without_an_error(valkey: Valkey) -> None:
    async def check(connection: LiveConnection) -> None:
        await asyncio.gather(*(connection.call("PING") for _ in range(5)))
        first = connection.run_id
        await asyncio.to_thread(valkey.restart)
        for _ in range(6):
            assert await connection.call("PING") == b"PONG"
        assert connection.run_id != first

    directly(valkey, check)


def test_a_script_meant_for_the_server_before_a_restart_is_not_sent(valkey: Valkey) -> None:
    async def check(connection: LiveConnection) -> None:
        await connection.call("PING")
        known = connection.run_id
        assert await connection.run_script(ECHO, [], ["a"], known) == [b"a"]
        await asyncio.to_thread(valkey.restart)
        with pytest.raises(LiveRestartedError):
            await connection.run_script(ECHO, [], ["b"], known)
        assert await connection.run_script(ECHO, [], ["c"], connection.run_id) == [b"c"]

    directly(valkey, check)


def test_scripts_are_loaded_again_after_a_script_flush(valkey: Valkey) -> None:
    async def check(connection: LiveConnection) -> None:
        script = load_script("doc_put")
        keys, args = ["d", "i", "c", "a"], ["key", "k1", 1, "{}", "{}", 10, 10]
        assert await connection.run_script(script, keys, args) == [b"k1", 1]
        await connection.call("SCRIPT", "FLUSH")
        assert await connection.run_script(script, keys, args) == [b"k1", 1]
        known = (await connection.call("SCRIPT", "EXISTS", script.sha1))[0]
        assert known == 1

    directly(valkey, check)


def test_a_missing_server_socket_is_reported_as_unavailable(tmp_path: Path) -> None:
    async def run() -> None:
        connection = LiveConnection(f"unix://{tmp_path}/nobody.sock")
        with pytest.raises(LiveUnavailableError, match=r"nobody\.sock"):
            await connection.call("PING")

    asyncio.run(run())


CUT_OFF = {
    "a replica": [],
    "a replica that finds no primary": [("CONFIG", "SET", "replica-serve-stale-data", "no")],
    "a primary without its replicas": [("REPLICAOF", "NO", "ONE"), ("CONFIG", "SET", "min-replicas-to-write", "1")],
}
"""Commands sent to the server after it became a replica."""


@pytest.fixture
def demoted(any_server: Valkey) -> Iterator[Callable[[str], None]]:
    """Makes the server unable to act as primary until the end of the test."""

    def demote(what: str) -> None:
        any_server.demote()
        for command in CUT_OFF[what]:
            assert any_server.command(*command) == "+OK\r\n"

    yield demote
    any_server.promote()
    for option, value in (("replica-serve-stale-data", "yes"), ("min-replicas-to-write", "0")):
        any_server.command("CONFIG", "SET", option, value)


@pytest.mark.parametrize("what", CUT_OFF)
@pytest.mark.parametrize("by_script", [True, False])
def test_after_a_failover_all_links_are_reconnected_to_the_new_primary(
    any_server: Valkey, demoted: Callable[[str], None], valkey: Valkey, tmp_path: Path, what: str, by_script: bool
) -> None:
    async def check(connection: LiveConnection, proxy: DelayProxy) -> None:
        connection._breaker.clock = clock = Clock()
        await asyncio.gather(*(connection.call("PING") for _ in range(4)))
        before = connection.run_id
        demoted(what)
        proxy.target = valkey.socket_path
        with pytest.raises(LiveUnavailableError, match="cannot act as the primary"):
            await put_document(connection) if by_script else await connection.call("SET", "text", "x")
        assert connection.up_since is None
        clock.now += 1
        assert await connection.call("PING") == b"PONG"
        texts = [str(index) for index in range(4)]
        await asyncio.gather(*(connection.call("SET", text, text) for text in texts))
        assert connection.run_id != before
        assert connection.up_since is not None
        assert proxy.num_connections == 8
        assert await connection.call("MGET", *texts) == [text.encode() for text in texts]
        assert valkey.command("DBSIZE") == ":4\r\n"

    through_proxy(any_server, tmp_path, check)


def test_a_replica_is_reported_as_unavailable_even_for_a_ping(valkey: Valkey) -> None:
    async def check(connection: LiveConnection) -> None:
        connection._breaker.clock = clock = Clock()
        valkey.demote()
        with pytest.raises(LiveUnavailableError, match="replica"):
            await connection.call("PING")
        valkey.promote()
        clock.now += 1
        assert await connection.call("PING") == b"PONG"

    directly(valkey, check)


def test_a_script_queued_before_links_are_renewed_is_not_sent(valkey: Valkey) -> None:
    async def check(connection: LiveConnection) -> None:
        await connection.call("PING")
        waiting = [await connection._places.acquire() for _ in range(NUM_LINKS)]
        late = asyncio.create_task(connection.run_script(ECHO, [], ["a"], connection.run_id))
        await asyncio.sleep(0)
        connection.renew_links()
        for _ in waiting:
            connection._places.release()
        with pytest.raises(LiveRestartedError):
            await late
        assert await connection.run_script(ECHO, [], ["b"], connection.run_id) == [b"b"]

    directly(valkey, check)


@pytest.mark.parametrize(
    "error",
    [
        "CLUSTERDOWN The cluster is down",
        "MOVED 3999 127.0.0.1:6381",
        "MOVED 3999",
        "ASK somewhere else",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        "LOADING Redis is loading the dataset in memory",
    ],
)
def test_a_server_that_cannot_act_as_primary_is_called_on_a_new_link_next_time(tmp_path: Path, error: str) -> None:
    async def run() -> None:
        async with refusing_server(tmp_path / "kv.sock", error) as connections:
            connection = LiveConnection(f"unix://{tmp_path}/kv.sock")
            connection._breaker.clock = clock = Clock()
            for number in range(1, 4):
                with pytest.raises(LiveUnavailableError, match=r"Redis: "):
                    await connection.call("GET", "text")
                assert (len(connections), connection.up_since) == (number, None)
                clock.now += 1
            await connection.close()

    asyncio.run(run())


async def put_document(connection: LiveConnection) -> None:
    await connection.run_script(load_script("doc_put"), ["d", "i", "c", "a"], ["key", "k1", 1, "{}", "{}", 10, 10])


@asynccontextmanager
async def refusing_server(path: Path, error: str) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Accepts connections, and answers every later command with `error`. Yields its connections."""
    connections: list[asyncio.StreamWriter] = []

    async def serve_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            match words[0]:
                case b"INFO":
                    writer.write(b"$10\r\nrun_id:abc\r\n")
                case b"CLIENT":
                    writer.write(b"+OK\r\n")
                case _:
                    writer.write(f"-{error}\r\n".encode())
        writer.close()

    server = await asyncio.start_unix_server(serve_client, path)
    try:
        yield connections
    finally:
        server.close()
        await asyncio.sleep(0)

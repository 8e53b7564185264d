import asyncio
from pathlib import Path

import pytest

from loraserve.live.errors import LiveRefusedError, LiveSchemaError, LiveUnavailableError
from loraserve.live.live_store import LiveStore
from tests.support.clock import Clock
from tests.support.valkey import Valkey, valkey
from tests.unit.live.conftest import RunCheck, run_check

__all__ = ["valkey"]


def test_a_view_is_current_once_accepted(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        assert not await store.view.is_current()
        assert await store.view.accept(await store.view.begin())
        assert await store.view.is_current()

    on_any_server(check)


def test_a_view_started_before_redis_was_emptied_is_not_accepted(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        mark = await store.view.begin()
        await store.connection.call("FLUSHALL")
        assert not await store.view.accept(mark)
        assert store.view.accepted is None

    on_any_server(check)


def test_a_mark_is_accepted_once(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        mark = await store.view.begin()
        assert await store.view.accept(mark)
        assert not await store.view.accept(mark)

    on_any_server(check)


def test_processes_that_build_a_view_concurrently_agree_on_the_epoch(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        marks = [await store.view.begin(), await store.view.begin()]
        epochs = set()
        for mark in marks:
            assert await store.view.accept(mark)
            assert store.view.accepted is not None
            epochs.add(store.view.accepted.epoch)
        assert len(epochs) == 1

    on_any_server(check)


def test_a_view_stays_current_on_a_redis_out_of_memory(any_server: Valkey, on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        assert await store.view.accept(await store.view.begin())
        assert any_server.command("CONFIG", "SET", "maxmemory", "1") == "+OK\r\n"
        assert await store.view.is_current()

    try:
        on_any_server(check)
    finally:
        assert any_server.command("CONFIG", "SET", "maxmemory", "0") == "+OK\r\n"


def test_a_server_that_refuses_scripts_is_not_current(any_server: Valkey, on_any_server: RunCheck) -> None:
    """It would admit no request, although it answers and accepts writes."""

    async def check(store: LiveStore) -> None:
        assert await store.view.accept(await store.view.begin())
        assert any_server.command("ACL", "SETUSER", "default", "-eval", "-evalsha") == "+OK\r\n"
        with pytest.raises(LiveRefusedError, match="no permissions"):
            await store.view.is_current()

    try:
        on_any_server(check)
    finally:
        assert any_server.command("ACL", "SETUSER", "default", "+@all") == "+OK\r\n"


def test_an_emptied_redis_makes_the_view_outdated(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        assert await store.view.accept(await store.view.begin())
        await store.connection.call("FLUSHALL")
        assert not await store.view.is_current()
        assert store.view.accepted is None

    on_any_server(check)


def test_a_restart_of_redis_before_or_after_accept_invalidates_the_view(valkey: Valkey, tmp_path: Path) -> None:
    async def check(store: LiveStore) -> None:
        mark = await store.view.begin()
        await asyncio.to_thread(valkey.restart)
        assert not await store.view.accept(mark)
        assert await store.view.accept(await store.view.begin())
        await asyncio.to_thread(valkey.restart)
        assert not await store.view.is_current()

    run_check(valkey.url, check)


def test_keys_of_another_schema_version_are_refused(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.connection.call("HSET", "{ls}:meta", "schema", "7")
        with pytest.raises(LiveSchemaError, match=r"\{ls\}.*version 7; this loraserve uses 1.*--redis-prefix"):
            await store.view.begin()

    on_server(check)


def test_a_view_accepted_before_a_server_was_a_replica_is_invalid(valkey: Valkey) -> None:
    """As a replica it copied the data of its primary, which may have been older, and its run id did not change."""

    async def check(store: LiveStore) -> None:
        store.connection._breaker.clock = clock = Clock()
        assert await store.view.accept(await store.view.begin())
        before = await store.view.begin()
        valkey.demote()
        with pytest.raises(LiveUnavailableError, match="cannot act as the primary"):
            await store.connection.call("SET", "text", "x")
        valkey.promote()
        clock.now += 1
        assert store.view.accepted is None
        assert not await store.view.is_current()
        assert not await store.view.accept(before)
        assert store.view.accepted is None
        assert await store.view.accept(await store.view.begin())
        assert await store.view.is_current()

    run_check(valkey.url, check)

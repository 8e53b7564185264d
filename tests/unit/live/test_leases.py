import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from loraserve.live.errors import LiveUnavailableError
from loraserve.live.leases import LAPSED_AFTER_MS, LEASE_MS, Lease, parse_member
from loraserve.live.live_store import LiveStore
from loraserve.live.server_link import Command
from loraserve.live.snapshots import Snapshot, SnapshotKind
from tests.support.live_documents import admit_call, build_usual_view, finish_call, lease, num_in_flight
from tests.unit.live.conftest import RunCheck

LONG_AGO_S = (LEASE_MS + LAPSED_AFTER_MS) / 1000 + 1


async def expire(store: LiveStore, held: Lease, ago_ms: int) -> None:
    end_ms = await store.connection.server_time_ms() - ago_ms
    await store.connection.call("ZADD", "{ls}:l:all", end_ms, held.member())
    await store.connection.call("ZADD", f"{{ls}}:l:t:{held.tenant}", end_ms, held.request_id)


@pytest.mark.parametrize("held", [lease(), lease(key_id=None)])
def test_a_lease_is_parsed_from_its_set_member(held: Lease) -> None:
    assert parse_member(held.member().encode()) == held


def test_renewal_restores_leases_in_an_emptied_redis(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        await store.admission.admit(admit_call("r1"))
        await store.admission.admit(admit_call("r2", key_id=None))
        await store.connection.call("FLUSHALL")
        await store.leases.renew()
        assert await num_in_flight(store) == 2
        assert await num_in_flight(store, "acme") == 2

    on_any_server(check)


def test_renewal_extends_an_expiring_lease(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        await store.admission.admit(admit_call())
        await expire(store, lease(), ago_ms=1)
        assert await num_in_flight(store) == 0
        await store.leases.renew()
        assert await num_in_flight(store) == 1

    on_any_server(check)


def test_a_finished_request_is_not_renewed(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        call = admit_call()
        await store.admission.admit(call)
        await asyncio.gather(store.leases.renew(), store.admission.finish(finish_call(call)), store.leases.renew())
        assert store.leases._held == {}
        assert await num_in_flight(store) == 0
        assert await num_in_flight(store, "acme") == 0

    on_any_server(check)


def test_dropping_a_lease_waits_for_a_renewal_in_progress(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        store.leases.hold(lease())
        async with store.leases._renewing:
            dropping = asyncio.create_task(store.leases.drop("r1"))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not dropping.done()
        await dropping

    on_server(check)


def test_an_expired_lease_is_not_counted_as_in_flight(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        await store.admission.admit(admit_call())
        await expire(store, lease(), ago_ms=1)
        assert await num_in_flight(store, "acme") == 0

    on_any_server(check)


def test_leases_of_a_dead_process_are_found_complete(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        await store.admission.admit(admit_call())
        await expire(store, lease(), LAPSED_AFTER_MS + 1)
        assert await store.leases.lapsed() == []  # both Redis and the process may have restarted just now
        store.connection.up_since = time.monotonic() - LONG_AGO_S
        assert await store.leases.lapsed() == [lease()]
        body = msgspec.Raw(b"{}")
        await store.snapshots.put(SnapshotKind.PROCESS, Snapshot(owner="p1", at=time.time(), body=body))
        assert await store.leases.lapsed() == []

    on_any_server(check)


def test_unsettled_leases_of_a_live_process_do_not_hide_lapsed_ones(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        snapshot = Snapshot(owner="p1", at=time.time(), body=msgspec.Raw(b"{}"))
        await store.snapshots.put(SnapshotKind.PROCESS, snapshot)
        for number in range(5):
            await expire(store, lease(f"unsettled{number}"), LAPSED_AFTER_MS + 2000)
        lost = [lease(f"lost{number}", process="p2") for number in range(3)]
        for held in lost:
            await expire(store, held, LAPSED_AFTER_MS + 1)
        store.connection.up_since = time.monotonic() - LONG_AGO_S
        assert [await store.leases.lapsed(limit) for limit in (2, 3, 100)] == [lost[:2], lost, lost]

    on_any_server(check)


def test_a_lease_that_expired_recently_has_not_lapsed_yet(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        await store.admission.admit(admit_call())
        await expire(store, lease(), LAPSED_AFTER_MS // 2)
        store.connection.up_since = time.monotonic() - LONG_AGO_S
        assert await store.leases.lapsed() == []

    on_any_server(check)


@pytest.mark.parametrize("is_admitted", [False, True])
def test_the_renewal_shows_whether_an_unanswered_admission_took_effect(
    on_any_server: RunCheck, is_admitted: bool
) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        if is_admitted:
            await store.admission.admit(admit_call())
        store.leases.hold(lease(), is_confirmed=False)
        for _ in range(2):
            await store.leases.renew()
        assert await store.leases.drop("r1") == is_admitted
        assert (store.leases._unconfirmed, store.leases._put_by_renewal) == (set(), set())

    on_any_server(check)


def test_after_an_unanswered_renewal_the_lease_does_not_prove_the_admission(
    on_any_server: RunCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing is refunded that may not have been taken."""

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        store.leases.hold(lease(), is_confirmed=False)
        call_many = store.connection.call_many

        async def lose_answer(commands: Sequence[Command]) -> list[Any]:
            replies = await call_many(commands)
            if commands[0][0] == "ZADD":
                raise LiveUnavailableError("cut off")
            return replies

        with monkeypatch.context() as patches:
            patches.setattr(store.connection, "call_many", lose_answer)
            with pytest.raises(LiveUnavailableError):
                await store.leases.renew()
        await store.leases.renew()
        assert not await store.leases.drop("r1")

    on_any_server(check)

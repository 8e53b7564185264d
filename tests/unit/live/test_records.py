"""Snapshots, series, sessions, ended requests, audit and changes."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from loraserve.live import changes
from loraserve.live.audit import AuditEntry
from loraserve.live.errors import LiveRestartedError, LiveUnavailableError
from loraserve.live.key_names import KeyNames
from loraserve.live.live_store import LiveStore
from loraserve.live.requests import RECENT_S, EndState
from loraserve.live.series import NUM_SAMPLES, Interval, Sample
from loraserve.live.sessions import (
    IDEMPOTENCY_S,
    MAX_SESSIONS,
    SESSION_S,
    UNFINISHED_S,
    IdempotencyRecord,
    LoginLink,
    Session,
)
from loraserve.live.snapshots import Snapshot, SnapshotKind
from loraserve.store.records import DocumentKind
from tests.support.clock import Clock
from tests.support.delay_proxy import delay_proxy
from tests.support.live_documents import admit_call, build_usual_view, finish_call, key_document
from tests.support.valkey import Valkey, running_valkey, valkey
from tests.unit.live.conftest import RunCheck, run_check

__all__ = ["valkey"]

BODY = msgspec.Raw(b'{"running":3}')


def snapshot(owner: str, at: float = 1.0) -> Snapshot:
    return Snapshot(owner=owner, at=at, body=BODY)


def test_snapshots_are_replaced_and_listed_by_kind(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        for owner, at in (("b", 1.0), ("a", 1.0), ("a", 2.0)):
            await store.snapshots.put(SnapshotKind.ENGINE, snapshot(owner, at))
        await store.snapshots.put(SnapshotKind.PROCESS, snapshot("p"))
        found = await store.snapshots.all(SnapshotKind.ENGINE)
        assert [(each.owner, each.at) for each in found] == [("a", 2.0), ("b", 1.0)]
        assert bytes(found[0].body) == bytes(BODY)
        await store.snapshots.remove(SnapshotKind.ENGINE, "a")
        assert [each.owner for each in await store.snapshots.all(SnapshotKind.ENGINE)] == ["b"]
        assert await store.snapshots.get(SnapshotKind.ENGINE, "a") is None

    on_any_server(check)


def test_a_snapshot_that_is_not_replaced_expires(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.snapshots.put(SnapshotKind.ENGINE, snapshot("a"))
        assert 4000 < await store.connection.call("PTTL", "{ls}:e:a") <= 5000
        await store.connection.call("DEL", "{ls}:e:a")
        assert await store.snapshots.all(SnapshotKind.ENGINE) == []
        assert await store.connection.call("ZCARD", "{ls}:i:e") == 0

    on_any_server(check)


def test_a_server_whose_clock_is_ahead_does_not_hide_other_servers(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        store = LiveStore(valkey.url)
        await store.snapshots.put(SnapshotKind.PROCESS, snapshot("right"))
        monkeypatch.setattr(time, "time", lambda: 1e10)
        await store.snapshots.put(SnapshotKind.PROCESS, snapshot("ahead"))
        assert [each.owner for each in await store.snapshots.all(SnapshotKind.PROCESS)] == ["ahead", "right"]
        await store.close()

    asyncio.run(run())


def test_samples_are_read_in_order_from_a_given_time_on(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        for index in range(5):
            await store.series.append(Interval.FINE, Sample(engine="e1", at=index, body=BODY))
        assert [sample.at for sample in await store.series.read("e1", Interval.FINE, 0.0)] == [0, 1, 2, 3, 4]
        assert await store.series.read("e1", Interval.FINE, time.time() + 60) == []
        assert await store.series.read("e1", Interval.COARSE, 0.0) == []

    on_any_server(check)


def test_old_samples_are_dropped(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        for index in range(2 * NUM_SAMPLES[Interval.FINE]):
            await store.series.append(Interval.FINE, Sample(engine="e1", at=index, body=BODY))
        kept = await store.series.read("e1", Interval.FINE, 0.0)
        assert NUM_SAMPLES[Interval.FINE] <= len(kept) < 1.5 * NUM_SAMPLES[Interval.FINE]
        assert kept[-1].at == 2 * NUM_SAMPLES[Interval.FINE] - 1

    on_server(check)


def test_a_session_lives_until_it_is_removed(on_any_server: RunCheck) -> None:
    session = Session(token_sha256="a" * 64, key_id="k1", csrf="c", created_at=1.0)

    async def check(store: LiveStore) -> None:
        await store.sessions.put(session)
        assert await store.sessions.get("a" * 64) == session
        assert await store.sessions.get("b" * 64) is None
        await store.sessions.remove(session)
        assert await store.sessions.get("a" * 64) is None

    on_any_server(check)


def session_number(number: int, key_id: str = "k1") -> Session:
    return Session(token_sha256=f"{number:064}", key_id=key_id, csrf="c", created_at=1.0)


def test_a_session_beyond_the_maximum_of_a_key_ends_the_oldest(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.sessions.put(session_number(1000, "k2"))
        for number in range(MAX_SESSIONS):
            await store.sessions.put(session_number(number))
            await asyncio.sleep(0.002)  # so that the next one is younger by Redis's clock
        assert await store.sessions.get(f"{0:064}") is not None
        # A logout makes room.
        await store.sessions.remove(session_number(5))
        await store.sessions.put(session_number(MAX_SESSIONS))
        assert await store.sessions.get(f"{0:064}") is not None
        await asyncio.gather(*(store.sessions.put(session_number(MAX_SESSIONS + 1 + number)) for number in range(3)))
        found = [await store.sessions.get(f"{number:064}") is not None for number in range(MAX_SESSIONS + 4)]
        assert [number for number, is_there in enumerate(found) if not is_there] == [0, 1, 2, 5]
        assert await store.sessions.get(f"{1000:064}") is not None

    on_any_server(check)


def test_the_session_index_of_a_key_is_removed_with_its_sessions(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        of_key = KeyNames().key_sessions("k1")
        await store.sessions.put(session_number(1))
        left_s = await store.connection.call("TTL", of_key)
        assert SESSION_S - 5 < left_s <= SESSION_S
        # An expired session is removed from the index when the next one starts.
        await store.connection.call("ZADD", of_key, 1, f"{2:064}")
        await store.sessions.put(session_number(3))
        assert await store.connection.call("ZRANGE", of_key, 0, -1) == [f"{each:064}".encode() for each in (1, 3)]
        for number in (1, 3):
            await store.sessions.remove(session_number(number))
        assert await store.connection.call("EXISTS", of_key) == 0
        assert await store.connection.call("KEYS", "*:s:*") == []

    on_server(check)


def test_a_session_stored_under_another_token_is_not_returned(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.sessions.put(Session(token_sha256="a" * 64, key_id="k1", csrf="c", created_at=1.0))
        body = await store.connection.call("GET", f"{{ls}}:s:{'a' * 64}")
        await store.connection.call("SET", f"{{ls}}:s:{'b' * 64}", body)
        assert await store.sessions.get("b" * 64) is None

    on_server(check)


def test_a_login_link_works_once_even_for_concurrent_callers(on_any_server: RunCheck) -> None:
    link = LoginLink(token_sha256="a" * 64, key_id="k1", created_at=1.0)

    async def check(store: LiveStore) -> None:
        await store.sessions.put_link(link)
        taken = await asyncio.gather(*(store.sessions.take_link("a" * 64) for _ in range(8)))
        assert [each for each in taken if each is not None] == [link]

    on_any_server(check)


def test_a_repeated_request_sees_the_first_ones_record(on_any_server: RunCheck) -> None:
    record = IdempotencyRecord(tenant="acme", client_key="retry: 1 }", fingerprint="f")

    async def check(store: LiveStore) -> None:
        assert await store.sessions.begin_idempotent(record) is None
        found = await store.sessions.begin_idempotent(record)
        assert found is not None
        assert (found.fingerprint, found.is_done) == ("f", False)
        assert await store.sessions.begin_idempotent(msgspec.structs.replace(record, tenant="zeta")) is None
        done = msgspec.structs.replace(record, response=msgspec.Raw(b'{"id":1}'))
        await store.sessions.end_idempotent(done)
        found = await store.sessions.begin_idempotent(record)
        assert found is not None
        assert found.is_done
        assert bytes(found.response) == b'{"id":1}'
        await store.sessions.cancel_idempotent("acme", "retry: 1 }")
        assert await store.sessions.begin_idempotent(record) is None

    on_any_server(check)


def test_an_unfinished_idempotency_record_expires_sooner_than_a_finished_one(on_server: RunCheck) -> None:
    record = IdempotencyRecord(tenant="acme", client_key="k", fingerprint="f")
    name = KeyNames().idempotency("acme", "k")

    async def check(store: LiveStore) -> None:
        assert await store.sessions.begin_idempotent(record) is None
        assert 0 < await store.connection.call("TTL", name) <= UNFINISHED_S
        await store.sessions.begin_idempotent(record)
        assert 0 < await store.connection.call("TTL", name) <= UNFINISHED_S
        await store.connection.call("PEXPIRE", name, 0)
        assert await store.sessions.begin_idempotent(record) is None
        await store.sessions.end_idempotent(msgspec.structs.replace(record, response=msgspec.Raw(b"{}")))
        assert UNFINISHED_S < await store.connection.call("TTL", name) <= IDEMPOTENCY_S

    on_server(check)


def test_ended_requests_are_visible_to_their_tenant_only(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        call = admit_call("r1")
        await store.admission.admit(call)
        await store.admission.finish(finish_call(call, state=EndState.FAILED))
        found = await store.requests.ended("acme", "r1")
        assert found is not None
        assert found.state is EndState.FAILED
        assert await store.requests.ended("zeta", "r1") is None
        assert await store.requests.ended("acme", "r2") is None

    on_any_server(check)


def test_recent_requests_expire_after_the_last_request_of_a_tenant(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        for index in range(2):
            call = admit_call(f"r{index}")
            await store.admission.admit(call)
            await store.admission.finish(finish_call(call))
            assert RECENT_S - 60 < await store.connection.call("TTL", KeyNames().recent_requests("acme")) <= RECENT_S
            await store.connection.call("EXPIRE", KeyNames().recent_requests("acme"), 60)

    on_any_server(check)


def test_recent_requests_can_be_forgotten(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        call = admit_call("r1")
        await store.admission.admit(call)
        await store.admission.finish(finish_call(call))
        assert len(await store.requests.recent("acme", 10)) == 1
        await store.requests.forget(["zeta"])
        assert len(await store.requests.recent("acme", 10)) == 1
        await store.requests.forget(["acme"])
        assert await store.requests.recent("acme", 10) == []

    on_any_server(check)


def test_recent_requests_are_paged_newest_first(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        for index in range(5):
            call = admit_call(f"r{index}")
            await store.admission.admit(call)
            await store.admission.finish(finish_call(call))
        page = await store.requests.recent("acme", 2)
        assert [each.request.request_id for each in page] == ["r4", "r3"]
        page = await store.requests.recent("acme", 10, before=page[-1].position)
        assert [each.request.request_id for each in page] == ["r2", "r1", "r0"]

    on_any_server(check)


def test_logins_and_refusals_are_recorded_in_the_audit_too(on_any_server: RunCheck) -> None:
    entry = AuditEntry(at=1.0, actor="k1", action="login.refused", tenant="acme", detail="wrong key")

    async def check(store: LiveStore) -> None:
        await store.documents.put(key_document())
        await store.audit.append(entry)
        newest, older = await store.audit.read(10)
        assert newest.entry == entry
        assert [each.entry for each in await store.audit.read(10, before=newest.position)] == [older.entry]

    on_any_server(check)


def test_reading_changes_waits_for_the_next_one(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.documents.put(key_document())
        start = await store.changes.latest()
        assert await store.changes.read(start, wait_s=0.01) == []
        waiting = asyncio.create_task(store.changes.read(start, wait_s=5))
        await asyncio.sleep(0)
        await store.documents.put(key_document(rev=2))
        (change,) = await waiting
        assert (change.kind, change.id, change.rev) == ("key", "k1", 2)
        assert await store.changes.latest() == change.position

    on_any_server(check)


def test_a_reader_of_changes_is_notified_of_a_restart_once(valkey: Valkey) -> None:
    async def check(store: LiveStore) -> None:
        assert await store.changes.latest() == "0-0"
        assert await store.changes.read("0-0", wait_s=0.01) == []
        await asyncio.to_thread(valkey.restart)
        with pytest.raises(LiveRestartedError):
            await store.changes.read("0-0", wait_s=0.01)
        await store.documents.put(key_document())
        assert len(await store.changes.read("0-0", wait_s=0.01)) == 1

    run_check(valkey.url, check)


def test_changes_are_read_from_the_new_primary_after_a_failover(
    valkey: Valkey, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def check() -> None:
        async with delay_proxy(tmp_path, valkey.socket_path) as proxy:
            store, other = LiveStore(proxy.url, timeout_s=5.0), LiveStore(successor.url, timeout_s=5.0)
            store.connection._breaker.clock = clock = Clock()
            await store.documents.put(key_document("k1"))
            assert [change.id for change in await store.changes.read("0-0")] == ["k1"]
            valkey.demote()
            proxy.target = successor.socket_path
            with pytest.raises(LiveUnavailableError, match="cannot act as the primary"):
                await store.documents.put(key_document("k2"))
            await other.documents.put(key_document("k3"))
            with pytest.raises(LiveRestartedError):
                await store.changes.read("0-0")
            assert [change.id for change in await store.changes.read("0-0")] == ["k3"]
            clock.now += 1
            await store.documents.put(key_document("k4"))
            assert await other.documents.all_revs(DocumentKind.KEY) == {"k3": 1, "k4": 1}
            await store.close()
            await other.close()

    with running_valkey(tmp_path_factory.mktemp("successor")) as successor:
        asyncio.run(check())


def test_a_timeout_while_reading_changes_raises_unavailable(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "CALL_S", 0.1)

    async def check() -> None:
        async with delay_proxy(tmp_path, valkey.socket_path) as proxy:
            store = LiveStore(proxy.url, timeout_s=5.0)
            assert await store.changes.read("0-0", 0.01) == []
            proxy.flowing.clear()
            with pytest.raises(LiveUnavailableError, match="cannot read changes from Redis: no answer in time"):
                await store.changes.read("0-0", 0.01)
            await store.close()

    asyncio.run(check())


def test_a_blocked_reader_of_changes_fails_at_once_if_its_server_becomes_a_replica(valkey: Valkey) -> None:
    async def check(store: LiveStore) -> None:
        assert await store.changes.read("0-0", 0.001) == []
        assert await store.view.accept(await store.view.begin())
        reading = asyncio.create_task(store.changes.read("0-0", 60.0))
        async with asyncio.timeout(20):
            while "blocked_clients:1\r\n" not in valkey.command("INFO", "clients"):
                await asyncio.sleep(0.01)
        valkey.demote()
        with pytest.raises(LiveUnavailableError, match="cannot act as the primary"):
            await reading
        assert store.view.accepted is None

    run_check(valkey.url, check)

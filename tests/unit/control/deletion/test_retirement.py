import asyncio
import shutil
from pathlib import Path

import pytest

from loraserve.control.deletion import retirement
from loraserve.control.deletion.retirement import KEPT_AT_LEAST_S
from loraserve.control.documents.adapter_edits import RESTORABLE_S
from loraserve.control.tenancy.audit_trail import AuditQuery, AuditTrail
from loraserve.control.tenancy.key_documents import IssuedKey, KeyPatch
from loraserve.live.errors import LiveUnavailableError
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.documents import KEEP_S
from loraserve.store.records import ANY_TENANT, AnyDocument, DocumentKind, Role
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, DONE, Node, eventually, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]

KEY, ADAPTER = DocumentKind.KEY, DocumentKind.ADAPTER
DAY_S = 86_400.0


async def key(node: Node, **more: float) -> IssuedKey:
    return await node.keys.create(ACME, "r", role=Role.INFER, **more)


async def gone(node: Node) -> list[str]:
    """Creates a key that stays. Returns the ids of a key revoked, a key expired and an adapter deleted just now."""
    await node.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)
    revoked, expired = await key(node), await key(node, expires_at=node.clock.now + 0.5)
    node.clock.now += 0.5
    await node.publish("old", "its content")
    await node.publish("kept", "its content")
    await node.adapters.delete(ACME, "r", "old", drain_s=0)
    await node.keys.revoke(ACME, "r", revoked.document.id)
    return [revoked.document.id, expired.document.id, "acme/old"]


def known(node: Node) -> dict[str, int]:
    return {document.id: document.rev for kind in (KEY, ADAPTER) for document in node.catalog.all(kind)}


def on_disk(node: Node) -> dict[str, int]:
    return {document.id: document.rev for kind in (KEY, ADAPTER) for document in node.documents.scan(kind)}


async def in_redis(node: Node) -> dict[str, int]:
    return await node.live.documents.all_revs(KEY) | await node.live.documents.all_revs(ADAPTER)


async def told(node: Node) -> None:
    """As the next reconciliation does."""
    await node.catalog.catch_up()


async def level(node: Node) -> None:
    """As after a restart of Redis."""
    node.live.view.forget()
    await node.catalog.synchronise()


def test_documents_gone_for_30_days_are_removed_from_disk_redis_and_every_servers_memory(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            principal = await one.authenticator.authenticate((await key(one)).text)
            ids = await gone(one)
            await one.admission.finish(await one.admit(principal, "kept"), DONE)
            await told(two)
            before = set(known(two))
            one.clock.now += KEEP_S - 1
            await one.retirement.sweep()
            assert set(on_disk(one)) == set(known(one)) == set(await in_redis(one)) == before >= {*ids}
            one.clock.now += 1
            await one.retirement.sweep()
            await told(two)
            for found in (on_disk(one), known(one), known(two), await in_redis(one)):
                assert set(found) == before - {*ids}
            # The audit trail and the usage log still have these events.
            entries = (await AuditTrail(one.live, one.documents).list(ADMIN, AuditQuery(action="key.revoke"))).items
            assert [(act.entry.id, act.before, act.after) for act in entries] == [(ids[0], None, None)]
            assert [line.adapter for line in one.usage_lines()] == ["kept"]
            for node in (one, two):
                with pytest.raises(ServingError) as missing:
                    await node.keys.read(ACME, ids[0])
                assert missing.value.code is ErrorCode.NOT_FOUND
            # Nothing comes back.
            valkey.command("FLUSHALL")
            for node in (two, one):
                await level(node)
            assert set(await in_redis(one)) == before - {*ids}

    run(scenario)


def test_the_oldest_of_too_many_gone_documents_are_removed_early(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retirement, "MAX_GONE", 2)

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            stays = await key(node)
            made: list[str] = []
            for number in range(4):
                made.append((await key(node)).document.id)
                await node.keys.revoke(ACME, "r", made[-1])
                await node.publish(f"a{number}", "its content")
                await node.adapters.delete(ACME, "r", f"a{number}", drain_s=0)
                node.clock.now += 1
            node.clock.now += KEPT_AT_LEAST_S
            await node.retirement.sweep()
            names = {f"acme/a{number}" for number in range(4)}
            assert set(on_disk(node)) == {stays.document.id, *made[2:], *names}
            # Deleted adapters stay as long as they can be restored.
            node.clock.now += RESTORABLE_S
            await node.retirement.sweep()
            assert set(on_disk(node)) == {stays.document.id, *made[2:], "acme/a2", "acme/a3"}

    run(scenario)


def test_a_reused_name_is_served_even_by_servers_that_did_not_hear_of_its_retirement(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            await gone(one)
            await eventually(lambda: known(two) == known(one))
            last = known(two)["acme/old"]
            one.clock.now += KEEP_S
            two.clock.now = one.clock.now
            await one.retirement.sweep()
            assert "acme/old" in known(two)
            await one.publish("old", "another content")
            await eventually(lambda: known(two).get("acme/old", 0) > last)
            for node in (one, two):
                admitted = await node.admit(ACME, "old")
                assert admitted.target.adapter is not None
                assert admitted.target.adapter.version == 1
            assert known(one)["acme/old"] == known(two)["acme/old"] == on_disk(two)["acme/old"] == last + 1
            await level(two)
            assert (await in_redis(two))["acme/old"] == last + 1

    run(scenario)


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_server_that_did_not_hear_of_a_revocation_does_not_bring_the_key_back(
    valkey: Valkey, tmp_path: Path, asks_first: bool
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            await key(one)
            issued = await key(one)
            await one.publish("kept", "its content")
            await told(two)
            await two.admit(await two.authenticator.authenticate(issued.text), "kept")
            await one.keys.revoke(ACME, "r", issued.document.id)
            one.clock.now += KEEP_S
            await one.retirement.sweep()
            assert issued.document.id in known(two)
            if asks_first:
                principal = await two.authenticator.authenticate(issued.text)
                with pytest.raises(ServingError) as refused:
                    await two.admit(principal, "kept")
                assert refused.value.code is ErrorCode.INVALID_API_KEY
                assert issued.document.id not in known(two)
            valkey.command("FLUSHALL")
            await level(two)
            for node in (one, two):
                assert issued.document.id not in {**known(node), **await in_redis(node)}
                with pytest.raises(ServingError) as refused:
                    await node.authenticator.authenticate(issued.text)
                assert refused.value.code is ErrorCode.INVALID_API_KEY

    run(scenario)


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_an_older_copy_of_the_data_directory_does_not_bring_a_key_back(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture, num_before: int
) -> None:
    """num_before: keys removed before the copy was made, at as high a revision as the key reaches later."""

    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            stays, issued, *others = [await key(node) for _ in range(2 + num_before)]
            for other in others:
                await node.keys.revoke(ACME, "r", other.document.id)
                node.clock.now += KEEP_S
                await node.retirement.sweep()
            revoked = await key(node)
            await node.keys.revoke(ACME, "r", revoked.document.id)
            await node.publish("kept", "its content")
            shutil.copytree(data_dir, copy)
            await node.keys.revoke(ACME, "r", issued.document.id)
            node.clock.now += KEEP_S
            await node.retirement.sweep()
            assert not {issued.document.id, revoked.document.id} & {*on_disk(node)}
        for _ in range(2):
            async with running_node(copy, valkey.url, follow=False) as again:
                again.clock.now = node.clock.now
                principal = await again.authenticator.authenticate(issued.text)
                with pytest.raises(ServingError) as refused:
                    await again.admit(principal, "kept")
                assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
                with pytest.raises(ServingError) as refused:
                    await again.authenticator.confirm(principal)
                assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
                assert issued.document.id not in await in_redis(again)
                works = await again.authenticator.authenticate(stays.text)
                await again.admit(await again.authenticator.confirm(works), "kept")
                # Removing documents from the copy would make it look as new as Redis.
                await again.retirement.sweep()
                assert revoked.document.id in on_disk(again)
        assert "documents of the kind key were removed up to revision" in caplog.text

    run(scenario)


def test_a_clock_that_is_years_ahead_removes_no_working_key(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await key(node)
            ended, works = [await key(node, expires_at=node.clock.now + days * DAY_S) for days in (1, 90)]
            node.clock.now += 60 * DAY_S
            await key(node)
            now = node.clock.now
            node.clock.now += 3650 * DAY_S
            await node.retirement.sweep()
            assert ended.document.id not in on_disk(node)
            node.clock.now = now
            assert (await node.authenticator.authenticate(works.text)).key_id == works.document.id

    run(scenario)


def test_a_revoked_key_that_is_also_a_flag_key_does_not_work_again_after_a_sweep(
    valkey: Valkey, tmp_path: Path
) -> None:
    """For example, if `LORASERVE_API_KEY` is set for the commands and a server is started in the same environment."""

    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            _, given, other = [await key(node) for _ in range(3)]
            for issued in (given, other):
                await node.keys.revoke(ACME, "r", issued.document.id)
        async with running_node(data_dir, valkey.url, follow=False, flag_keys=("password", given.text)) as again:
            again.clock.now += KEEP_S
            await again.retirement.sweep()
            assert other.document.id not in on_disk(again)
            with pytest.raises(ServingError) as refused:
                await again.authenticator.authenticate(given.text)
            assert refused.value.code is ErrorCode.INVALID_API_KEY

    run(scenario)


def test_removals_during_a_synchronization_do_not_make_documents_look_lost(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            stays = await key(node)
            await gone(node)
            node.clock.now += KEEP_S
            removed_rev, loop = node.documents.removed_rev, asyncio.get_running_loop()
            others = {DocumentKind.KEY: 0}

            def removed_meanwhile(kind: DocumentKind) -> int:
                rev = removed_rev(kind)
                if kind in others:
                    others[kind] += 1
                    if others[kind] == 2:  # The first call is from the preceding scan.
                        asyncio.run_coroutine_threadsafe(node.retirement.sweep(), loop).result()
                return rev

            monkeypatch.setattr(node.documents, "removed_rev", removed_meanwhile)
            valkey.command("FLUSHALL")
            await level(node)
            assert others[DocumentKind.KEY] > 2
            await node.admit(await node.authenticator.authenticate(stays.text), "kept")
        assert caplog.text == ""

    run(scenario)


@pytest.mark.parametrize("kind", [KEY, ADAPTER])
def test_retired_documents_left_in_redis_are_removed_without_complaint(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: DocumentKind
) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            ids = await gone(node)
            doomed = [document for document in node.documents.scan(kind) if document.id in ids]
            node.documents.retire(doomed)
        async with running_node(data_dir, valkey.url, follow=False) as again:
            assert not {document.id for document in doomed} & {*known(again), *await in_redis(again)}
            for document in doomed:
                await again.live.documents.put(document)
            await level(again)
            assert not {document.id for document in doomed} & {*known(again), *await in_redis(again)}
        assert caplog.text == ""

    run(scenario)


def test_a_servers_last_keys_are_never_retired_so_it_stays_closed(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            made = [await key(node) for _ in range(2)]
            for issued in made:
                await node.keys.revoke(ACME, "r", issued.document.id)
            node.clock.now += KEEP_S
            await node.retirement.sweep()
            assert set(on_disk(node)) == {issued.document.id for issued in made}
            # A deleted tenant's key may be erased with it.
            others = await node.keys.create(ADMIN, "r", role=Role.INFER, tenant="globex")
            await node.tenant_deletion.delete(ADMIN, "r", "globex")
            await node.retirement.sweep()
            assert set(on_disk(node)) == {*(issued.document.id for issued in made), others.document.id}
            stays = await key(node)
            await node.retirement.sweep()
            assert set(on_disk(node)) == {stays.document.id, others.document.id}
        async with running_node(tmp_path / "data", valkey.url, follow=False) as again:
            assert not again.authenticator.is_open

    run(scenario)


def test_a_server_that_did_not_hear_that_documents_were_revived_does_not_retire_them(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            _, expired, _ = await gone(one)
            await told(two)
            await one.publish("old", "another content")
            await one.keys.patch(ACME, "r", expired, KeyPatch(expires_at=None))
            two.clock.now = one.clock.now + KEEP_S
            before = on_disk(one)
            await two.retirement.sweep()
            assert {*on_disk(one)} >= {"acme/old", expired}
            assert len(on_disk(one)) == len(before) - 1
            await told(two)
            await two.admit(ACME, "old")

    run(scenario)


def test_an_older_copy_does_not_retire_documents_that_are_newer_in_redis(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            await gone(node)
            shutil.copytree(data_dir, copy)
            await node.adapters.restore(ACME, "r", "old")
            newest = known(node)["acme/old"]
        async with running_node(copy, valkey.url, follow=False) as again:
            again.clock.now = node.clock.now + KEEP_S
            await again.retirement.sweep()
            assert on_disk(again)["acme/old"] == newest - 1
            assert (await in_redis(again))["acme/old"] == newest

    run(scenario)


def test_nothing_is_retired_without_redis(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            ids = await gone(node)
            node.clock.now += KEEP_S

            async def fail(*_: object) -> int:
                raise LiveUnavailableError("it is gone")

            with monkeypatch.context() as patched:
                patched.setattr(node.live.documents, "revs", fail)
                await node.retirement.sweep()
            assert {*ids} <= {*on_disk(node)}
            assert "postponed: it is gone" in caplog.text
            await node.retirement.sweep()
            assert not {*ids} & {*on_disk(node)}

    run(scenario)


def test_listeners_see_a_retired_adapter_as_deleted_and_without_versions(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await gone(node)
            heard: list[AnyDocument] = []
            node.catalog.subscribe(heard.append)
            node.clock.now += KEEP_S
            await node.retirement.sweep()
            told_of = {document.id: document.doc for document in heard}
            assert len(told_of) == 3
            assert getattr(told_of["acme/old"], "versions", None) == []
            assert getattr(told_of["acme/old"], "deleted_at", None) is not None

    run(scenario)

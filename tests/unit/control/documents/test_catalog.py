import asyncio
import contextlib
import errno
import shutil
import time
from pathlib import Path
from typing import NoReturn

import pytest
from msgspec.structs import replace

from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.offline_keys import revoke_key_offline
from loraserve.live.live_store import LiveStore
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store import documents
from loraserve.store.documents import UNSETTLED_NS, DocumentStore
from loraserve.store.records import AdapterDoc, Document, DocumentKind, KeyDoc, Role, Status
from tests.support.store_documents import adapter_document, key_document, tenant_document
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, Node, eventually, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]


def test_startup_fills_an_empty_redis_from_disk(valkey: Valkey, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    store = DocumentStore(data_dir)
    store.commit(adapter_document("sql", 1))
    store.commit(adapter_document("sql", 2))
    store.commit(tenant_document("acme"))

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url) as node:
            assert node.catalog.ready
            adapter = node.catalog.adapter("acme", "sql")
            assert adapter is not None
            assert adapter.rev == 2
            assert await node.live.documents.all_revs(DocumentKind.ADAPTER) == {"acme/sql": 2}
            assert await node.live.documents.all_revs(DocumentKind.TENANT) == {"acme": 1}

    run(scenario)


def test_two_processes_on_one_redis_and_data_directory_see_each_others_changes(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            await eventually(lambda: two.catalog.tenant("acme") is not None)
            await two.publish("sql", "one")
            await eventually(lambda: one.catalog.adapter("acme", "sql") is not None)
            assert one.catalog.adapter("acme", "sql") == two.catalog.adapter("acme", "sql")

    run(scenario)


def test_everything_declared_still_works_after_flushall(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            valkey.command("FLUSHALL")
            principal = await node.authenticator.authenticate(issued.text)
            admitted = await node.admit(principal, "sql")
            assert admitted.target.adapter is not None
            assert admitted.target.adapter.digest == digest
            revisions = await node.live.documents.all_revs(DocumentKind.ADAPTER)
            assert revisions == {"acme/sql": 1}

    run(scenario)


def test_an_idle_process_refills_a_redis_that_was_emptied(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            valkey.command("FLUSHALL")
            async with asyncio.timeout(20):
                while len(await node.live.documents.all_revs(DocumentKind.TENANT)) < 4:
                    await asyncio.sleep(0.01)

    run(scenario)


def test_an_older_redis_cannot_unrevoke_a_key(valkey: Valkey, tmp_path: Path) -> None:
    """A replica that was behind is promoted: it holds the key as it was before its revocation."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            before = issued.document
            await node.keys.revoke(ACME, "r", issued.document.id)
            valkey.restart()
            replica = LiveStore(valkey.url)
            await replica.documents.put(before)
            # The process that knows of the revocation keeps running and corrects this Redis.
            async with asyncio.timeout(20):
                while (await replica.documents.all_revs(DocumentKind.KEY))[before.id] != 2:
                    await asyncio.sleep(0.01)
            await replica.close()
            await eventually(lambda: node.catalog.ready)
            with pytest.raises(ServingError) as refused:
                await node.authenticator.authenticate(issued.text)
            assert refused.value.code is ErrorCode.INVALID_API_KEY
            async with running_node(tmp_path / "data", valkey.url) as other:
                key = other.catalog.key(before.id)
                assert key is not None
                assert key.doc.status is Status.REVOKED

    run(scenario)


def test_a_revision_whose_writer_died_before_writing_it_to_redis_takes_effect(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            doc = issued.document
            revoked = Document(
                kind=DocumentKind.KEY,
                id=doc.id,
                rev=2,
                at=1.0,
                actor="cli",
                action="key.revoke",
                request_id="",
                doc=KeyDoc(
                    tenant="acme", role=Role.INFER, sha256=doc.doc.sha256, created_at=1.0, status=Status.REVOKED
                ),
            )
            node.documents.commit(revoked)
            await node.catalog.refresh(DocumentKind.KEY, doc.id)
            known = node.catalog.key(doc.id)
            assert known is not None
            assert known.doc.status is Status.REVOKED
            assert (await node.live.documents.all_revs(DocumentKind.KEY))[doc.id] == 2

    run(scenario)


def test_documents_found_by_a_scan_are_written_to_redis(valkey: Valkey, tmp_path: Path) -> None:
    """For example, the writer died before it could do so, and a publish then checks the quota."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            node.documents.commit(tenant_document("zeta"))
            await node.catalog.catch_up()
            assert node.catalog.tenant("zeta") is not None
            async with asyncio.timeout(20):
                while "zeta" not in await node.live.documents.all_revs(DocumentKind.TENANT):
                    await asyncio.sleep(0.005)

    run(scenario)


def test_a_key_revoked_in_the_data_directory_is_noticed_without_waiting_for_a_reconciliation(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        # It reconciles only once a minute, after this test would have timed out.
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            running = await node.admit(await node.authenticator.authenticate(issued.text))
            revoke_key_offline(DocumentStore(tmp_path / "data"), issued.document.id)
            await eventually(lambda: running.running.ended_with is not None)
            assert running.running.ended_with is not None
            assert running.running.ended_with.code is ErrorCode.INVALID_API_KEY
            # Redis is updated, for the other servers on it.
            async with asyncio.timeout(20):
                while (await node.live.documents.all_revs(DocumentKind.KEY))[issued.document.id] != 2:
                    await asyncio.sleep(0.01)

    run(scenario)


@pytest.mark.parametrize("unread", ["_content", "_names"], ids=["a file", "a folder"])
def test_a_key_revoked_in_a_briefly_unreadable_data_directory_is_noticed_at_the_next_check(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: str
) -> None:
    """No commit follows once the disk is readable again, so nothing else would trigger another scan."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            revoke_key_offline(DocumentStore(tmp_path / "data"), issued.document.id)
            monkeypatch.setattr("loraserve.control.documents.catalog.UNSETTLED_NS", -UNSETTLED_NS)
            with monkeypatch.context() as patched, contextlib.suppress(OSError):
                patched.setattr(f"loraserve.store.documents.{unread}", too_many_open)
                await node.catalog._notice_commits()
            await node.catalog._notice_commits()
            with pytest.raises(ServingError):
                await node.authenticator.authenticate(issued.text)

    run(scenario)


def test_commits_that_were_read_are_not_scanned_again(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            monkeypatch.setattr("loraserve.control.documents.catalog.UNSETTLED_NS", -UNSETTLED_NS)
            await node.catalog._notice_commits()
            monkeypatch.setattr(node.documents, "scan_changed", too_many_open)
            await node.catalog._notice_commits()

    run(scenario)


def too_many_open(path: str, *_: object) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files", path)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), None], ids=["unread", "torn"])
def test_a_key_whose_newer_revision_cannot_be_read_is_refused_until_it_can(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    """As after a restart, because that revision may be its revocation."""
    data_dir = tmp_path / "data"
    content = documents._content

    def limited(path: str) -> bytes:
        if path.endswith("/00000002.json") and "/key/" in path:
            if error is not None:
                raise error
            return b"torn"
        return content(path)

    async def refused(node: Node, text: str) -> None:
        with pytest.raises(ServingError) as told:
            await node.authenticator.authenticate(text)
        assert told.value.code is ErrorCode.INVALID_API_KEY

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            other = await node.keys.create(ACME, "r", role=Role.INFER)
            running = await node.admit(await node.authenticator.authenticate(issued.text))
            with monkeypatch.context() as patched:
                patched.setattr(documents, "_content", limited)
                newer = replace(issued.document, rev=2, doc=replace(issued.document.doc, name="renamed"))
                DocumentStore(data_dir).commit(newer)
                await eventually(lambda: running.running.ended_with is not None)
                assert running.running.ended_with is not None
                assert running.running.ended_with.code is ErrorCode.INVALID_API_KEY
                await refused(node, issued.text)
                assert issued.document.id not in [key.id for key in node.catalog.all_keys()]
                await node.authenticator.authenticate(other.text)
                async with running_node(data_dir, valkey.url) as restarted:
                    await refused(restarted, issued.text)
            await node.authenticator.authenticate(issued.text)
            key = node.catalog.key(issued.document.id)
            assert key is not None
            assert key.doc.name == "renamed"

    run(scenario)


def test_a_key_is_refused_if_the_revision_that_redis_reported_is_unreadable(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            revoke_key_offline(DocumentStore(tmp_path / "data"), issued.document.id)
            monkeypatch.setattr(documents, "_content", lambda _: b"torn")
            await node.catalog.reread(DocumentKind.KEY, issued.document.id)
            assert node.catalog.key(issued.document.id) is None

    run(scenario)


def test_a_known_key_stays_in_memory_if_it_cannot_be_read_again(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            monkeypatch.setattr(documents, "_content", lambda _: b"torn")
            await node.catalog.catch_up()
            await node.catalog.reread(DocumentKind.KEY, issued.document.id)
            assert node.catalog.key(issued.document.id) == issued.document

    run(scenario)


def test_a_tenant_deletion_is_noticed_even_if_its_server_died_before_telling_redis(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            running = await node.admit(await node.authenticator.authenticate(issued.text))
            tenant = node.catalog.tenant("acme")
            assert tenant is not None
            deleted = replace(tenant.doc, deleted_at=node.clock.now)
            DocumentStore(tmp_path / "data").commit(replace(tenant, rev=tenant.rev + 1, doc=deleted))
            await eventually(lambda: running.running.ended_with is not None)
            assert running.running.ended_with is not None
            assert running.running.ended_with.code is ErrorCode.NOT_FOUND

    run(scenario)


def test_memory_never_goes_back_to_an_older_revision(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            assert node.catalog.apply(key_document("abcdefgh", 2))
            assert not node.catalog.apply(key_document("abcdefgh", 1))
            assert not node.catalog.apply(key_document("abcdefgh", 2))
            key = node.catalog.key("abcdefgh")
            assert key is not None
            assert key.rev == 2

    run(scenario)


def test_logs_an_error_if_redis_has_newer_revisions_than_the_disk(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "first", valkey.url) as node:
            await with_tenants(node)
        async with running_node(tmp_path / "second", valkey.url) as node:
            assert node.catalog.tenant("acme") is None

    run(scenario)
    assert "which the data directory does not have" in caplog.text


@pytest.mark.slow
def test_ten_thousand_documents_are_synchronized_again_after_flushall(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing crashes here, and 20,000 syncs would take a minute.
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    data_dir = tmp_path / "data"
    store = DocumentStore(data_dir)
    store.commit(tenant_document("acme"))
    for number in range(10_000):
        store.commit(adapter_document(f"a{number}", 1))

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url, follow=False, synchronise=False) as node:
            began_s = time.perf_counter()
            await node.catalog.synchronise()
            first_s = time.perf_counter() - began_s
            valkey.command("FLUSHALL")
            node.live.view.forget()
            began_s = time.perf_counter()
            await node.catalog.synchronise()
            again_s = time.perf_counter() - began_s
            assert len(await node.live.documents.all_revs(DocumentKind.ADAPTER)) == 10_000
            print(f"10,000 documents: first {first_s:.2f} s, after FLUSHALL {again_s:.2f} s")

    run(scenario)


def test_listeners_hear_of_every_change_once(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            heard: list[tuple[str, int]] = []
            node.catalog.subscribe(lambda document: heard.append((document.id, document.rev)))
            await node.tenants.create(ADMIN, "r", "acme")
            await node.publish("sql", "one")
            await node.publish("sql", "two")
            assert heard == [("acme", 1), ("acme/sql", 1), ("acme/sql", 2)]
            assert isinstance(node.catalog.all_adapters()[0].doc, AdapterDoc)

    run(scenario)


def warnings_of(caplog: pytest.LogCaptureFixture, document_id: str) -> list[str]:
    return [
        record.getMessage().split(" of ")[0]
        for record in caplog.records
        if "which the data directory does not have" in record.getMessage() and document_id in record.getMessage()
    ]


def test_each_revision_missing_on_disk_is_logged_once_however_it_is_learned(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            key = (await one.keys.create(ACME, "r", role=Role.ADMIN)).document
            ref = (key.kind, key.id)
            shutil.copytree(data_dir, copy)
            async with running_node(copy, valkey.url) as two:
                await one.keys.patch(ACME, "r", key.id, KeyPatch(name="heard"))
                await eventually(lambda: two.catalog.is_behind(ref))
                for _ in range(3):
                    await two.catalog.query_revs([ref])
                assert warnings_of(caplog, key.id) == ["Redis knows revision 2"]
            async with running_node(copy, valkey.url, follow=False) as levelled:
                await levelled.catalog.query_revs([ref])
                assert warnings_of(caplog, key.id) == ["Redis knows revision 2"] * 2
                await one.keys.patch(ACME, "r", key.id, KeyPatch(name="asked"))
                await levelled.catalog.query_revs([ref])
                await one.keys.patch(ACME, "r", key.id, KeyPatch(name="put"))
                await levelled.catalog.refresh(*ref)
                assert warnings_of(caplog, key.id)[2:] == ["Redis knows revision 3", "Redis knows revision 4"]
                shutil.copytree(data_dir / "docs", copy / "docs", dirs_exist_ok=True)
                await levelled.catalog.catch_up()
                assert not levelled.catalog.is_behind(ref)

    run(scenario)


def test_a_newer_revision_that_redis_keeps_on_a_put_is_known_to_be_missing(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url, follow=False) as one:
            await with_tenants(one)
            key = (await one.keys.create(ACME, "r", role=Role.ADMIN)).document
            shutil.copytree(data_dir, copy)
            async with running_node(copy, valkey.url, follow=False) as two:
                await one.keys.revoke(ACME, "r", key.id)
                assert not two.catalog.is_behind((key.kind, key.id))
                await two.catalog.refresh(key.kind, key.id)
                assert two.catalog.is_behind((key.kind, key.id))

    run(scenario)


def test_a_document_forgotten_after_the_disk_caught_up_no_longer_counts_as_behind(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url, follow=False) as one:
            await with_tenants(one)
            key = (await one.keys.create(ACME, "r", role=Role.ADMIN)).document
            ref = (key.kind, key.id)
            shutil.copytree(data_dir, copy)
            async with running_node(copy, valkey.url, follow=False) as two:
                await one.keys.revoke(ACME, "r", key.id)
                await two.catalog.query_revs([ref])
                assert two.catalog.is_behind(ref)
                shutil.copytree(data_dir / "docs", copy / "docs", dirs_exist_ok=True)
                await two.catalog.catch_up()
                known = two.catalog.key(key.id)
                assert known is not None
                assert two.catalog.forget(known)
                assert not two.catalog.is_behind(ref)

    run(scenario)

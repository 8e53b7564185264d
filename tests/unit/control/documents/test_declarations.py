import asyncio
import shutil
from pathlib import Path

import pytest

from loraserve.control.adapters.service import AdapterPatch
from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.live.errors import LiveUnavailableError
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import AnyDocument, Document, DocumentKind, Role, Status, TenantDoc
from tests.support.store_documents import revisions
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, Node, eventually, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]


def test_revisions_are_gapless_and_record_who_did_what(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            await node.adapters.patch(ACME, "r2", "sql", AdapterPatch(description="SQL"))
            history = revisions(node.documents, "acme/sql", 3)
            assert [(found.rev, found.action, found.actor) for found in history] == [
                (2, "adapter.change", "cli"),
                (1, "version.publish", "cli"),
            ]
            assert history[0].request_id == "r2"

    run(scenario)


def test_a_change_that_changes_nothing_commits_nothing(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            first = await node.adapters.patch(ACME, "r", "sql", AdapterPatch(description="SQL"))
            again = await node.adapters.patch(ACME, "r", "sql", AdapterPatch(description="SQL"))
            assert (first.rev, again.rev) == (2, 2)

    run(scenario)


def test_an_if_match_of_an_old_revision_is_refused(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            await node.adapters.patch(ACME, "r", "sql", AdapterPatch(description="a"), expected_rev=1)
            with pytest.raises(ServingError) as refused:
                await node.adapters.patch(ACME, "r", "sql", AdapterPatch(description="b"), expected_rev=1)
            assert refused.value.code is ErrorCode.PRECONDITION_FAILED
            assert "revision 2" in refused.value.message

    run(scenario)


def test_only_one_of_two_servers_that_create_the_same_document_succeeds(valkey: Valkey, tmp_path: Path) -> None:
    def create(current: Document[TenantDoc] | None, salt: str) -> TenantDoc:
        if current is not None:
            raise ServingError(ErrorCode.CONFLICT, "exists")
        return TenantDoc(kv_salt=salt)

    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url) as one, running_node(data_dir, valkey.url) as two:
            results = await asyncio.gather(
                *(
                    node.declarations.edit(
                        TenantDoc,
                        "acme",
                        lambda current, salt=salt: create(current, salt),
                        actor="cli",
                        action="tenant.create",
                        request_id="r",
                    )
                    for node, salt in ((one, "1"), (two, "2"))
                ),
                return_exceptions=True,
            )
            errors = [result for result in results if isinstance(result, ServingError)]
            assert [error.code for error in errors] == [ErrorCode.CONFLICT]

    run(scenario)


def test_concurrent_edits_of_two_servers_are_all_kept(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            await one.publish("sql", "one")
            edits = [
                node.aliases.put(ACME, "r", "sql", f"{name}{number}", 1)
                for number in range(3)
                for name, node in (("a", one), ("b", two))
            ]
            await asyncio.gather(*edits)
            found = one.documents.get(DocumentKind.ADAPTER, "acme/sql")
            assert found is not None
            assert found.rev == 7
            assert set(found.doc.aliases) == {"live", "a0", "a1", "a2", "b0", "b1", "b2"}

    run(scenario)


def test_an_older_copy_does_not_change_documents_that_are_newer_in_redis(valkey: Valkey, tmp_path: Path) -> None:
    """After one more change, the copy's revision would equal Redis's or be newer."""

    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url) as node:
            await with_tenants(node)
            stays, issued = [await node.keys.create(ACME, "r", role=Role.INFER) for _ in range(2)]
            await node.publish("sql", "one")
            await node.publish("kept", "one")
            shutil.copytree(data_dir, copy)
            await node.keys.revoke(ACME, "r", issued.document.id)
            await node.adapters.delete(ACME, "r", "sql", drain_s=0)
            await node.tenants.patch(ADMIN, "r", "globex", TenantPatch(status=Status.SUSPENDED))
            await node.tenants.create(ADMIN, "r", "since")
        async with running_node(copy, valkey.url) as again:
            for change in (
                again.keys.patch(ACME, "r", issued.document.id, KeyPatch(name="renamed")),
                again.publish("sql", "two"),
                again.tenants.patch(ADMIN, "r", "globex", TenantPatch(description="changed")),
            ):
                with pytest.raises(ServingError) as refused:
                    await change
                assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
            for kind, document_id in (
                (DocumentKind.KEY, issued.document.id),
                (DocumentKind.ADAPTER, "acme/sql"),
                (DocumentKind.TENANT, "globex"),
            ):
                document = again.documents.get(kind, document_id)
                assert document is not None
                assert document.rev == 1
            await again.keys.revoke(ACME, "r", stays.document.id)
            await again.publish("kept", "two")
            await again.tenants.create(ADMIN, "r", "since")
            valkey.command("FLUSHALL")
            await eventually(lambda: not again.catalog.is_behind((DocumentKind.TENANT, "globex")))
            await again.tenants.patch(ADMIN, "r", "globex", TenantPatch(description="changed"))

    run(scenario)


def test_an_edit_that_changes_nothing_is_refused_on_a_disk_that_lags(valkey: Valkey, tmp_path: Path) -> None:
    """State that already matches the request on this disk may have changed since."""

    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            key_id = (await one.keys.create(ACME, "r", role=Role.ADMIN)).document.id
            await one.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.SUSPENDED))
            await one.tenants.patch(ADMIN, "r", "globex", TenantPatch(status=Status.SUSPENDED))
            await one.publish("sql", "one")
            await one.adapters.delete(ACME, "r", "sql", drain_s=0)
            shutil.copytree(data_dir, copy)
            await one.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.ACTIVE))
            await one.tenants.patch(ADMIN, "r", "globex", TenantPatch(status=Status.ACTIVE))
            await one.adapters.restore(ACME, "r", "sql")
            async with running_node(copy, valkey.url) as two:
                for change in (
                    two.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.SUSPENDED)),
                    two.tenants.patch(ADMIN, "r", "globex", TenantPatch(status=Status.SUSPENDED)),
                    two.tenant_deletion.restore(ADMIN, "r", "globex"),
                ):
                    with pytest.raises(ServingError) as refused:
                        await change
                    assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
                shutil.copytree(data_dir / "docs", copy / "docs", dirs_exist_ok=True)
                suspended = await two.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.SUSPENDED))
                assert suspended.rev == 4

    run(scenario)


def test_a_server_starts_on_an_older_copy_whose_builtin_tenants_lack_changes(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url) as node:
            await with_tenants(node)
            shutil.copytree(data_dir, copy)
            await node.tenants.patch(ADMIN, "r", "default", TenantPatch(description="changed"))
        async with running_node(copy, valkey.url) as again:
            await again.tenants.ensure_builtin()
            assert again.catalog.is_behind((DocumentKind.TENANT, "default"))

    run(scenario)


def test_a_server_starts_on_an_empty_directory_with_a_redis_that_has_documents(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.tenants.patch(ADMIN, "r", "default", TenantPatch(description="changed"))
        async with running_node(tmp_path / "empty", valkey.url) as again:
            await again.tenants.ensure_builtin()
            assert again.catalog.tenant("default") is not None

    run(scenario)


def test_nothing_is_changed_while_redis_is_gone(valkey: Valkey, tmp_path: Path) -> None:
    """A revocation fails instead of taking effect on this server only."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            valkey.kill()
            with pytest.raises(ServingError) as refused:
                await node.keys.revoke(ACME, "r", issued.document.id)
            assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
            assert refused.value.retry_after_s is not None
            found = node.documents.get(DocumentKind.KEY, issued.document.id)
            assert found is not None
            assert found.rev == 1
            # Reads still work.
            assert (await node.keys.read(ACME, issued.document.id)).doc.status is Status.ACTIVE

    run(scenario)


def test_nothing_is_changed_while_redis_is_full(valkey: Valkey, tmp_path: Path) -> None:
    """It answers, but would not accept the change."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            assert valkey.command("CONFIG", "SET", "maxmemory", "1") == "+OK\r\n"
            for call in (
                node.keys.create(ACME, "r", role=Role.INFER),
                node.keys.rotate(ACME, "r", issued.document.id, grace_s=0),
                node.keys.revoke(ACME, "r", issued.document.id),
            ):
                with pytest.raises(ServingError) as refused:
                    await call
                assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
            found = [*node.documents.scan(DocumentKind.KEY)]
            assert [(document.id, document.rev) for document in found] == [(issued.document.id, 1)]
            assert valkey.command("CONFIG", "SET", "maxmemory", "0") == "+OK\r\n"
            await node.keys.revoke(ACME, "r", issued.document.id)

    run(scenario)


def test_a_change_on_disk_takes_effect_if_redis_fails_and_reaches_redis_later(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new secret, which is shown only once, is not lost."""

    async def refused(document: AnyDocument) -> int:
        raise LiveUnavailableError("Redis refused: OOM")

    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            rotated = await one.keys.create(ACME, "r", role=Role.INFER)
            with monkeypatch.context() as failing:
                failing.setattr(one.live.documents, "put", refused)
                new = await one.keys.create(ACME, "r", role=Role.INFER)
                rotated = await one.keys.rotate(ACME, "r", rotated.document.id, grace_s=0)
                await one.tenants.patch(ADMIN, "r", "globex", TenantPatch(status=Status.SUSPENDED))
                for issued in (new, rotated):
                    assert (await one.authenticator.authenticate(issued.text)).key_id == issued.document.id
            for kind, document_id, rev in (
                (DocumentKind.KEY, new.document.id, 1),
                (DocumentKind.KEY, rotated.document.id, 2),
                (DocumentKind.TENANT, "globex", 2),
            ):
                async with asyncio.timeout(20):
                    while (await one.live.documents.all_revs(kind)).get(document_id) != rev:
                        await asyncio.sleep(0.005)
            await eventually(lambda: globex_status(two) is Status.SUSPENDED)
            await two.admit(await two.authenticator.authenticate(rotated.text))

    run(scenario)


def globex_status(node: Node) -> Status | None:
    document = node.catalog.tenant("globex")
    return None if document is None else document.doc.status


def test_a_commit_completes_if_its_caller_is_cancelled(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            loop, begun, commit = asyncio.get_running_loop(), asyncio.Event(), node.documents.commit

            def announced(document: AnyDocument) -> None:
                loop.call_soon_threadsafe(begun.set)
                commit(document)

            monkeypatch.setattr(node.documents, "commit", announced)
            task = asyncio.create_task(node.keys.patch(ACME, "r", issued.document.id, KeyPatch(name="new")))
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(20):
                while (await node.live.documents.all_revs(DocumentKind.KEY))[issued.document.id] != 2:
                    await asyncio.sleep(0.005)
            found = node.documents.get(DocumentKind.KEY, issued.document.id)
            assert found is not None
            assert (found.rev, found.doc.name) == (2, "new")

    run(scenario)

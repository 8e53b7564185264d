"""Erasing tenants must be safe despite wrong clocks, older copies of a data directory, servers that lag, and files
that cannot be read."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from loraserve.control.deletion.erasure import PROPAGATED_AFTER_S
from loraserve.control.documents.adapter_edits import RESTORABLE_S
from loraserve.control.documents.tenant_edits import TenantState
from loraserve.store.blobs import SWEEP_AFTER_S
from loraserve.store.documents import DocumentStore
from loraserve.store.errors import DamagedFileError
from loraserve.store.records import ANY_TENANT, AnyDocument, DocumentKind, KeyDoc, Role
from loraserve.store.uploads import UploadStore
from tests.support.valkey import Valkey, valkey
from tests.unit.control.contents.test_reachability import age
from tests.unit.control.deletion.test_erasure import FILES, customer, erased, grown_old, in_redis, on_disk
from tests.unit.control.deletion.test_tenant_deletion import state_of
from tests.unit.control.nodes import ADMIN, Node, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]

DAY_S = 86_400.0


def held(node: Node, tenant: str = "acme") -> list[AnyDocument]:
    return [
        document
        for kind in (DocumentKind.KEY, DocumentKind.ADAPTER)
        for document in node.catalog.all(kind)
        if getattr(document.doc, "tenant", None) == tenant
    ]


async def being_erased(node: Node) -> list[str]:
    """The erasure is decided but not done. Returns the digests, as `customer` does."""
    await with_tenants(node)
    digests = await customer(node)
    await node.tenant_deletion.delete(ADMIN, "r", "acme")
    grown_old(node, digests)
    node.clock.now += RESTORABLE_S
    await node.erasure.sweep()
    node.clock.now += PROPAGATED_AFTER_S
    return digests


def test_a_server_whose_clock_is_two_days_ahead_erases_no_tenant_early(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            one.clock.now = time.time()
            two.clock.now = one.clock.now + 2 * DAY_S
            own, _ = await customer(one)
            young = one.put_blob("uploaded a moment ago, to be named by a document at once")
            await one.tenant_deletion.delete(ADMIN, "r", "acme")
            await two.catalog.catch_up()
            for _ in range(2):
                await two.erasure.sweep()
            assert two.blobs.folder(own) is not None
            assert two.blobs.folder(young) is not None
            await one.tenant_deletion.restore(ADMIN, "r", "acme")
            assert await state_of(one) is TenantState.ACTIVE
            assert {document.id for document in one.catalog.held_adapters("acme")} == {"acme/invoices"}

    run(scenario)


def test_a_clock_that_is_set_back_delays_an_erasure_but_does_not_undo_it(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await being_erased(node)
            node.clock.now -= 3 * DAY_S
            await node.erasure.sweep()
            assert await state_of(node) is TenantState.DELETED
            with pytest.raises(Exception, match="it is erased"):
                await node.tenant_deletion.restore(ADMIN, "r", "acme")
            node.clock.now += 3 * DAY_S
            await node.erasure.sweep()
            assert await state_of(node) is TenantState.ERASED

    run(scenario)


def test_an_older_copy_does_not_erase_a_tenant_that_was_restored_since(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            await customer(node)
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            shutil.copytree(data_dir, copy)
            await node.tenant_deletion.restore(ADMIN, "r", "acme")
        async with running_node(copy, valkey.url, follow=False) as again:
            before = len(held(again))
            for step_s in (RESTORABLE_S, PROPAGATED_AFTER_S, PROPAGATED_AFTER_S):
                again.clock.now += step_s
                await again.erasure.sweep()
            assert len([*again.documents.scan(DocumentKind.ADAPTER)]) == 2
            assert before == len(held(again)) == 2
        assert "Redis knows revision 4 of tenant 'acme', which the data directory does not have" in caplog.text
        assert "erasing the tenant 'acme' is postponed" in caplog.text

    run(scenario)


def test_a_tenant_that_is_newer_in_redis_does_not_block_the_erasure_of_others_on_an_older_copy(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        others = [f"t{number}" for number in range(5)]
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await being_erased(node)
            shutil.copytree(data_dir, copy)
            node.clock.now += PROPAGATED_AFTER_S
            await node.erasure.sweep()
            assert await state_of(node) is TenantState.ERASED
        async with running_node(copy, valkey.url, follow=False) as again:
            for other in others:
                await again.tenants.create(ADMIN, "r", other)
                await again.tenant_deletion.delete(ADMIN, "r", other)
            for step_s in (RESTORABLE_S, PROPAGATED_AFTER_S):
                again.clock.now += step_s
                await again.erasure.sweep()
            erased = [
                other
                for other in others
                if again.tenant_deletion.state_of(await again.tenants.read(ADMIN, other)) is TenantState.ERASED
            ]
            assert erased == others

    run(scenario)


def test_nothing_is_erased_from_an_older_copy_put_in_place_under_a_running_server(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            await customer(node)
            shutil.copytree(data_dir / "docs", copy)
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            node.clock.now += RESTORABLE_S
            await node.erasure.sweep()
            shutil.rmtree(data_dir / "docs")
            shutil.copytree(copy, data_dir / "docs")
            node.clock.now += PROPAGATED_AFTER_S
            await node.erasure.sweep()
            assert "invoices" in on_disk(node)
            found = node.documents.get(DocumentKind.TENANT, "acme")
            assert found is not None
            assert found.rev == 2

    run(scenario)


def test_data_that_a_lagging_server_wrote_after_the_erasure_is_erased_too(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digests = await customer(node)
            late = held(node)
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            grown_old(node, digests)
            await erased(node)
            content = node.put_blob("its own")
            age(node, content, node.clock.now - SWEEP_AFTER_S - 1)
            UploadStore(node.data_dir).create(tenant="acme", name="late", actor="k", files=FILES)
            for document in late:
                first = replace(document, rev=1)
                node.documents.commit(first)
                await node.live.documents.put(first)
            await node.erasure.sweep()
            assert "invoices" not in on_disk(node) + await in_redis(node)
            assert node.blobs.folder(content) is None
            assert {session.tenant for session in UploadStore(node.data_dir).sessions()} == {"globex"}
            assert len([*node.documents.scan(DocumentKind.ADAPTER)]) == 1

    run(scenario)


def test_data_that_an_older_server_put_only_into_redis_is_erased_too(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digests = await customer(node)
            late = held(node)
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            grown_old(node, digests)
            await erased(node)
            for document in late:
                await node.live.documents.put(document)
            await node.live.connection.call("XADD", "{ls}:r:acme", "*", "v", "{}")
            await node.erasure.sweep()
            assert "invoices" not in await in_redis(node)
            assert await node.live.connection.call("EXISTS", "{ls}:r:acme") == 0
            assert {*await node.live.documents.all_revs(DocumentKind.ADAPTER)} == {"globex/copy"}

    run(scenario)


def test_an_unreadable_key_does_not_keep_contents_on_disk(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            own, _ = await being_erased(node)
            orphan = node.put_blob("orphan")
            age(node, orphan, 0)
            for path in (node.data_dir / "docs" / "key").glob("*/*/*.json"):
                if b"root" in path.read_bytes():
                    path.write_bytes(b"{")
            await node.erasure.sweep()
            assert node.blobs.folder(orphan) is None
            assert node.blobs.folder(own) is None
            # The unreadable key could be one of the tenant's.
            assert await state_of(node) is TenantState.DELETED

    run(scenario)


def test_an_unreadable_tenant_does_not_block_the_erasure_of_others(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await customer(node)
            for tenant in ("acme", "globex"):
                await node.tenant_deletion.delete(ADMIN, "r", tenant)
            damaged = max((node.data_dir / "docs" / "tenant").glob("*/*/*.json"), key=_is_of_acme)
            damaged.write_bytes(b"{")
            node.clock.now += RESTORABLE_S
            await node.erasure.sweep()
            node.clock.now += PROPAGATED_AFTER_S
            await node.erasure.sweep()
            assert await state_of(node, "globex") is TenantState.ERASED
            assert "invoices" in on_disk(node)

    run(scenario)


def _is_of_acme(path: Path) -> tuple[bool, str]:
    return b'"id":"acme"' in path.read_bytes(), path.name


def test_trash_left_by_a_killed_server_is_gone_once_the_tenant_is_marked_erased(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await being_erased(node)
            (key,) = [found.doc for found in node.documents.scan(DocumentKind.KEY) if _is_key_of(found, "acme")]
            assert isinstance(key, KeyDoc)
            with monkeypatch.context() as patched:
                patched.setattr("loraserve.store.durable.remove_folder", lambda path: None)
                for document in [*node.documents.scan(DocumentKind.KEY)]:
                    if _is_key_of(document, "acme"):
                        node.documents.remove(DocumentKind.KEY, document.id)
            await node.erasure.sweep()
            assert await state_of(node) is TenantState.ERASED
            left = [path for path in (node.data_dir / "docs").rglob("*") if path.is_file()]
            assert not [path for path in left if key.sha256 in path.read_text()]

    run(scenario)


def _is_key_of(document: AnyDocument, tenant: str) -> bool:
    return isinstance(document.doc, KeyDoc) and document.doc.tenant == tenant


def test_no_content_is_lost_if_the_disk_fails_briefly(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the file nor the folder of one document can be read, though both were listed before."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digests = await customer(node)
            grown_old(node, digests)
            (victim,) = (path for path in (node.data_dir / "docs" / "adapter").glob("*/*") if "invoices" in _text(path))
            with monkeypatch.context() as disk:
                for name in ("open", "stat"):
                    disk.setattr(os, name, _stuck_at(victim, getattr(os, name)))
                with pytest.raises(DamagedFileError):
                    await node.erasure.sweep()
            assert all(node.blobs.folder(digest) is not None for digest in digests)

    run(scenario)


def _text(folder: Path) -> str:
    return max(folder.iterdir()).read_text()


def _stuck_at(folder: Path, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: object, *args: Any, **options: Any) -> Any:
        if str(path).startswith(str(folder)):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **options)

    return call


def test_erasing_a_tenant_spares_tenants_whose_ids_begin_alike(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            digests = await customer(node)
            for tenant in ("acm", "acme-2", "acmex"):
                await node.tenants.create(ADMIN, "r", tenant)
                await node.keys.create(ADMIN, "r", role=Role.INFER, tenant=tenant, name=f"of {tenant}")
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            grown_old(node, digests)
            await erased(node)
            left = {(found.doc.tenant, found.doc.name) for found in node.keys.list(ADMIN).items}
            assert {tenant for tenant, _ in left} == {"acm", "acme-2", "acmex", "globex", ANY_TENANT}
            assert {found.id for found in DocumentStore(node.data_dir).scan(DocumentKind.ADAPTER)} == {"globex/copy"}

    run(scenario)

from pathlib import Path

import pytest

from loraserve.control.deletion.erasure import PROPAGATED_AFTER_S
from loraserve.control.deletion.remains import Remains
from loraserve.control.documents.adapter_edits import RESTORABLE_S
from loraserve.control.documents.tenant_edits import TenantState
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.documents import DocumentStore
from loraserve.store.errors import DamagedFileError
from loraserve.store.records import ANY_TENANT, DocumentKind, Role
from loraserve.store.upload_session import UploadFile
from loraserve.store.uploads import UploadStore
from tests.support.valkey import Valkey, valkey
from tests.unit.control.contents.test_reachability import age
from tests.unit.control.deletion.test_tenant_deletion import GLOBEX, state_of
from tests.unit.control.nodes import ACME, ADMIN, Node, eventually, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]

FILES = [
    UploadFile(name="adapter_config.json", size_bytes=2),
    UploadFile(name="adapter_model.safetensors", size_bytes=9),
]


async def customer(node: Node) -> list[str]:
    """Everything that a tenant can have. Returns two digests: its own content, and content in common with globex."""
    await node.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT, name="root")
    await node.keys.create(ACME, "r", role=Role.INFER, name="of acme")
    await node.keys.create(GLOBEX, "r", role=Role.INFER, name="of globex")
    await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(description="Acme, Main Street"))
    digests = [await node.publish("invoices", "its own"), await node.publish("invoices", "in common")]
    await node.publish("copy", "in common", GLOBEX)
    UploadStore(node.data_dir).create(tenant="acme", name="half", actor="k", files=FILES)
    UploadStore(node.data_dir).create(tenant="globex", name="half", actor="k", files=FILES)
    return digests


def grown_old(node: Node, digests: list[str]) -> None:
    for digest in digests:
        age(node, digest, node.clock.now - RESTORABLE_S)


def on_disk(node: Node) -> str:
    docs = node.data_dir / "docs"
    return "\n".join(path.read_text() for path in docs.glob("*/*/*/*.json"))


async def in_redis(node: Node) -> str:
    bodies: list[str] = []
    for kind in DocumentKind:
        for document_id in await node.live.documents.all_revs(kind):
            document = await node.live.documents.get(kind, document_id)
            bodies.append(f"{document_id} {document}")
    return "\n".join(bodies)


async def erased(node: Node, tenant: str = "acme") -> None:
    """Lets time pass after a deletion until the tenant is erased."""
    node.clock.now += RESTORABLE_S
    await node.erasure.sweep()
    node.clock.now += PROPAGATED_AFTER_S
    await node.erasure.sweep()
    assert await state_of(node, tenant) is TenantState.ERASED


def test_a_day_after_its_deletion_only_a_tenants_id_is_left(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            own, common = await customer(node)
            (key,) = node.catalog.held_keys("acme")
            grown_old(node, [own, common])
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            node.clock.now += RESTORABLE_S - 1
            await node.erasure.sweep()
            assert node.blobs.folder(own) is not None
            assert await state_of(node) is TenantState.DELETED
            node.clock.now += 1
            await erased(node)
            for text in (on_disk(node), await in_redis(node), repr(node.catalog.all(DocumentKind.ADAPTER))):
                for trace in ("invoices", "Main Street", key.id, key.doc.sha256, own):
                    assert trace not in text
                assert "copy" in text
            # Content that another tenant also uses is kept.
            assert node.blobs.folder(own) is None
            assert node.blobs.folder(common) is not None
            assert [session.tenant for session in UploadStore(node.data_dir).sessions()] == ["globex"]
            assert {key.doc.name for key in node.keys.list(ADMIN).items} == {"root", "of globex"}
            # Its id cannot be reused, so its usage can still be attributed to it.
            assert [found.id for found in node.tenants.list(ADMIN, deleted=True).items] == ["acme"]
            assert "acme" in {found.id for found in node.catalog.known_tenants()}
            with pytest.raises(ServingError) as refused:
                await node.tenants.create(ADMIN, "r", "acme")
            assert refused.value.code is ErrorCode.CONFLICT
            # More sweeps and a repeated deletion change nothing.
            before = await node.tenants.read(ADMIN, "acme")
            await node.erasure.sweep()
            assert (await node.tenant_deletion.delete(ADMIN, "r", "acme")).document == before
        async with running_node(tmp_path / "data", valkey.url) as again:
            assert again.catalog.tenant("acme") is None
            assert await state_of(again) is TenantState.ERASED

    run(scenario)


@pytest.mark.parametrize("dies_in", ["remove", "remove_uploads", "forget_history", "sweep_contents"])
def test_an_erasure_cut_short_by_a_kill_is_completed_by_the_next_sweep(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    class KilledError(BaseException):
        pass

    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            digests = await customer(node)
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            node.clock.now += RESTORABLE_S
            grown_old(node, digests)
            await node.erasure.sweep()
            node.clock.now += PROPAGATED_AFTER_S

            def die(*_: object) -> None:
                raise KilledError

            with monkeypatch.context() as patched:
                if dies_in == "sweep_contents":
                    patched.setattr(node.erasure, "_sweep_contents", die)
                else:
                    patched.setattr(Remains, dies_in, die)
                with pytest.raises(KilledError):
                    await node.erasure.sweep()
            now = node.clock.now
            assert await state_of(node) is TenantState.DELETED
        async with running_node(data_dir, valkey.url, follow=False) as again:
            again.clock.now = now
            with pytest.raises(ServingError):
                await again.tenant_deletion.restore(ADMIN, "r", "acme")
            await again.erasure.sweep()
            assert await state_of(again) is TenantState.ERASED
            assert "invoices" not in on_disk(again) + await in_redis(again)
            assert again.blobs.folder(digests[0]) is None

    run(scenario)


def test_two_servers_erase_a_tenant_once_and_neither_brings_it_back(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            digests = await customer(one)
            await eventually(lambda: len(two.catalog.held_keys("acme")) == 1)
            await one.tenant_deletion.delete(ADMIN, "r", "acme")
            grown_old(one, digests)
            for step_s in (RESTORABLE_S, PROPAGATED_AFTER_S):
                one.clock.now += step_s
                two.clock.now = one.clock.now
                for node in (one, two):
                    await node.erasure.sweep()
            await eventually(lambda: all(_is_erased(node) for node in (one, two)))
            assert two.catalog.held_keys("acme") == two.catalog.held_adapters("acme") == []
            valkey.command("FLUSHALL")
            for node in (one, two):
                await eventually(lambda node=node: node.catalog.ready)
                node.live.view.forget()
                await node.catalog.synchronise()
            assert "invoices" not in await in_redis(one)
            audited = [record.entry.action for record in await one.live.audit.read(100)]
            assert audited.count("tenant.erased") == 1

    run(scenario)


def _is_erased(node: Node) -> bool:
    document = node.catalog.known_tenant("acme")
    return document is not None and document.doc.erased_at is not None


def test_a_restored_tenant_is_not_erased_by_a_server_that_has_not_heard_of_the_restore(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            await customer(one)
            await one.tenant_deletion.delete(ADMIN, "r", "acme")
            await two.catalog.catch_up()
            await one.tenant_deletion.restore(ADMIN, "r", "acme")
            two.clock.now += RESTORABLE_S
            await two.erasure.sweep()
            two.clock.now += PROPAGATED_AFTER_S
            await two.erasure.sweep()
            assert await state_of(two) is TenantState.ACTIVE
            assert len(two.catalog.adapters("acme")) == 1

    run(scenario)


def test_erased_documents_are_removed_from_an_older_redis(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            digests = await customer(node)
            old = [*node.catalog.held_keys("acme"), *node.catalog.held_adapters("acme")]
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            grown_old(node, digests)
            await erased(node)
            for document in old:
                await node.live.documents.put(document)
            assert "invoices" in await in_redis(node)
        async with running_node(data_dir, valkey.url) as again:
            assert "invoices" not in await in_redis(again)
            assert again.catalog.held_keys("acme") == []
        assert "which the data directory does not have" not in caplog.text

    run(scenario)


def test_no_tenant_is_marked_erased_while_a_document_is_unreadable_or_redis_is_gone(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url, follow=False) as node:
            await with_tenants(node)
            digests = await customer(node)
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            grown_old(node, digests)
            node.clock.now += RESTORABLE_S
            await node.erasure.sweep()
            node.clock.now += PROPAGATED_AFTER_S
            damaged = next(
                path for path in (data_dir / "docs" / "adapter").glob("*/*/*.json") if b"copy" in path.read_bytes()
            )
            whole = damaged.read_bytes()
            damaged.write_bytes(b"{")
            with pytest.raises(DamagedFileError):
                await node.erasure.sweep()
            assert await state_of(node) is TenantState.DELETED
            assert node.blobs.folder(digests[0]) is not None
            damaged.write_bytes(whole)
            orphan = node.put_blob("orphan")
            age(node, orphan, 0)
            valkey.kill()
            await node.erasure.sweep()
            assert await state_of(node) is TenantState.DELETED
            # Content that no document refers to is swept even without Redis.
            assert node.blobs.folder(orphan) is None
            assert [found.id for found in DocumentStore(data_dir).scan(DocumentKind.ADAPTER)] == ["globex/copy"]

    run(scenario)


def test_a_running_server_whose_only_keys_are_erased_does_not_open(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.keys.create(ACME, "r", role=Role.ADMIN)
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            assert not node.authenticator.is_open
            await erased(node)
            assert node.catalog.all(DocumentKind.KEY) == []
            assert not node.authenticator.is_open

    run(scenario)

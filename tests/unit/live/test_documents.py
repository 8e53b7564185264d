import pytest

from loraserve.live.errors import LiveUnavailableError
from loraserve.live.key_names import KeyNames
from loraserve.live.live_store import LiveStore
from loraserve.store.records import DocumentKind
from tests.support.live_documents import adapter_document, key_document, tenant_document
from tests.support.valkey import Valkey
from tests.unit.live.conftest import RunCheck, run_check

REFUSES_WRITES = {
    "it is full": [("CONFIG", "SET", "maxmemory", "1")],
    "it is a replica": [("REPLICAOF", "127.0.0.1", "1")],
    "it lost its replicas": [("CONFIG", "SET", "min-replicas-to-write", "1")],
}
AS_BEFORE = [
    ("REPLICAOF", "NO", "ONE"),
    ("CONFIG", "SET", "min-replicas-to-write", "0"),
    ("CONFIG", "SET", "maxmemory", "0"),
]


def test_a_document_of_each_kind_is_put_and_listed(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        for document in (tenant_document(), key_document(), adapter_document()):
            assert await store.documents.all_revs(document.kind) == {}
            assert await store.documents.put(document) == 1
            assert await store.documents.all_revs(document.kind) == {document.id: 1}

    on_any_server(check)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1, 3)])
def test_the_newest_revision_is_kept_in_any_order_of_arrival(on_any_server: RunCheck, order: tuple[int, ...]) -> None:
    async def check(store: LiveStore) -> None:
        for rev in order:
            await store.documents.put(key_document(rev=rev))
        assert await store.documents.all_revs(DocumentKind.KEY) == {"k1": 3}

    on_any_server(check)


def test_revisions_are_returned_in_the_order_requested(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.documents.put(key_document(rev=3))
        await store.documents.put(tenant_document(rev=2))
        refs = [(DocumentKind.TENANT, "acme"), (DocumentKind.KEY, "none"), (DocumentKind.KEY, "k1")]
        assert await store.documents.revs(refs) == [2, 0, 3]

    on_any_server(check)


def test_revisions_are_compared_as_numbers(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.documents.put(key_document(rev=9))
        assert await store.documents.put(key_document(rev=10)) == 10

    on_any_server(check)


def test_putting_an_old_revision_changes_and_announces_nothing(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.documents.put(key_document(rev=2))
        for rev in (1, 2):
            assert await store.documents.put(key_document(rev=rev)) == 2
        assert [change.rev for change in await store.changes.read("0-0")] == [2]
        assert [record.entry.rev for record in await store.audit.read(10)] == [2]

    on_any_server(check)


def test_all_documents_of_a_kind_are_listed_across_round_trips(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        for index in range(1001):
            await store.documents.put(key_document(f"k{index}"))
        await store.documents.put(tenant_document())
        assert await store.documents.all_revs(DocumentKind.KEY) == {f"k{index}": 1 for index in range(1001)}

    on_server(check)


def test_a_removed_document_is_not_listed_and_can_be_removed_again(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        document = adapter_document()
        await store.documents.put(document)
        await store.documents.put(adapter_document("kept"))
        assert await store.documents.get(DocumentKind.ADAPTER, document.id) == document
        for _ in range(2):
            await store.documents.remove(DocumentKind.ADAPTER, [document.id])
            assert await store.documents.get(DocumentKind.ADAPTER, document.id) is None
            assert await store.documents.all_revs(DocumentKind.ADAPTER) == {"acme/kept": 1}

    on_any_server(check)


def test_an_undecodable_document_is_returned_as_none(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.connection.call("HSET", KeyNames().document("key", "k1"), "rev", 1, "body", "{")
        assert await store.documents.get(DocumentKind.KEY, "k1") is None

    on_server(check)


def test_the_audit_names_actor_action_and_tenant_of_each_put(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.documents.put(tenant_document("zeta"))
        await store.documents.put(adapter_document(tenant="acme"))
        adapter, tenant = [record.entry for record in await store.audit.read(10)]
        assert (adapter.tenant, adapter.id, adapter.actor, adapter.action) == ("acme", "acme/poet", "k0", "adapter.put")
        assert (tenant.tenant, tenant.kind) == ("zeta", "tenant")

    on_server(check)


@pytest.mark.parametrize("how", REFUSES_WRITES.values(), ids=REFUSES_WRITES)
def test_check_writable_fails_on_a_server_that_refuses_writes(any_server: Valkey, how: list[tuple[str, ...]]) -> None:
    """Although it answers a PING."""

    async def check(store: LiveStore) -> None:
        await store.documents.check_writable()
        for command in how:
            assert any_server.command(*command) == "+OK\r\n"
        assert any_server.command("PING") == "+PONG\r\n"
        with pytest.raises(LiveUnavailableError):
            await store.documents.check_writable()

    assert any_server.command("FLUSHALL") == "+OK\r\n"
    try:
        run_check(any_server.url, check)
    finally:
        for command in AS_BEFORE:
            assert any_server.command(*command) == "+OK\r\n"


def test_retiring_removes_documents_unless_newer_and_remembers_the_highest_revision(
    on_any_server: RunCheck,
) -> None:
    async def check(store: LiveStore) -> None:
        for number, rev in enumerate((3, 4, 5)):
            await store.documents.put(key_document(f"k{number}", rev=rev))
        await store.documents.put(adapter_document())
        assert await store.documents.retire(DocumentKind.KEY, 0, {}) == 0
        revs = {"k0": 3, "k1": 3, "k2": 7, "missing": 1}
        assert await store.documents.retire(DocumentKind.KEY, 7, revs) == 7
        assert await store.documents.all_revs(DocumentKind.KEY) == {"k1": 4}
        assert await store.documents.get(DocumentKind.KEY, "k0") is None
        assert await store.documents.retire(DocumentKind.KEY, 5, {}) == 7
        assert await store.documents.retire(DocumentKind.ADAPTER, 0, {}) == 0
        assert len(await store.documents.all_revs(DocumentKind.ADAPTER)) == 1
        assert await store.documents.put(key_document("k0", rev=8)) == 8

    on_any_server(check)

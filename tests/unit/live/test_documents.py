import pytest

from loraserve.live.live_store import LiveStore
from loraserve.store.records import DocumentKind
from tests.support.live_documents import adapter_document, key_document, tenant_document
from tests.unit.live.conftest import RunCheck


def test_a_put_document_is_read_back_whole(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        for document in (tenant_document(), key_document(), adapter_document()):
            reply = await store.documents.put(document)
            assert (reply.was_newer, reply.rev) == (True, 1)
            assert await store.documents.get(document.kind, document.id) == document

    on_any_server(check)


def test_a_missing_document_is_none(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        assert await store.documents.get(DocumentKind.KEY, "nobody") is None

    on_server(check)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1, 3)])
def test_the_newest_revision_stays_in_whatever_order_they_come(on_any_server: RunCheck, order: tuple[int, ...]) -> None:
    async def check(store: LiveStore) -> None:
        for rev in order:
            await store.documents.put(key_document(rev=rev))
        document = await store.documents.get(DocumentKind.KEY, "k1")
        assert document is not None
        assert document.rev == 3
        assert await store.documents.revisions(DocumentKind.KEY) == {"k1": 3}

    on_any_server(check)


def test_revisions_are_compared_as_numbers(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.documents.put(key_document(rev=9))
        assert (await store.documents.put(key_document(rev=10))).was_newer

    on_any_server(check)


def test_an_old_revision_changes_and_announces_nothing(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.documents.put(key_document(rev=2))
        for rev in (1, 2):
            reply = await store.documents.put(key_document(rev=rev))
            assert (reply.was_newer, reply.rev) == (False, 2)
        assert [change.rev for change in await store.changes.read("0-0")] == [2]
        assert [record.entry.rev for record in await store.audit.read(10)] == [2]

    on_any_server(check)


def test_all_of_a_kind_are_listed_across_round_trips(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        for index in range(1001):
            await store.documents.put(key_document(f"k{index}"))
        await store.documents.put(tenant_document())
        found = [document.id async for document in store.documents.all(DocumentKind.KEY)]
        assert sorted(found) == sorted(f"k{index}" for index in range(1001))
        assert len(await store.documents.revisions(DocumentKind.KEY)) == 1001

    on_server(check)


def test_the_audit_names_who_did_what_to_which_tenant(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await store.documents.put(tenant_document("zeta"))
        await store.documents.put(adapter_document(tenant="acme"))
        adapter, tenant = [record.entry for record in await store.audit.read(10)]
        assert (adapter.tenant, adapter.id, adapter.actor, adapter.action) == ("acme", "acme/poet", "k0", "adapter.put")
        assert (tenant.tenant, tenant.kind) == ("zeta", "tenant")

    on_server(check)

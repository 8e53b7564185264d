from dataclasses import replace
from pathlib import Path

import pytest

from loraserve.control.paging import encode_cursor
from loraserve.control.tenancy import audit_trail
from loraserve.control.tenancy.audit_trail import AuditQuery, AuditTrail
from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.control.tenancy.refusals import DEDUPLICATE_S, HOUR_S, MAX_PER_HOUR, Refusals
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import AnyDocument, DocumentKind, Role
from tests.support.clock import Clock
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, Node, run, running_node, with_tenants

__all__ = ["valkey"]

ACME_ADMIN = Principal("k", Role.ADMIN, "acme", "acme", "k")
GLOBEX = server_principal("globex", "cli")


def trail(node: Node) -> AuditTrail:
    return AuditTrail(node.live, node.documents)


def test_an_audit_entry_shows_the_document_before_and_after_the_change(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "req-1", role=Role.INFER, name="ci")
            await node.keys.patch(ACME, "req-2", issued.document.id, KeyPatch(role=Role.VIEWER))
            page = await trail(node).list(ADMIN, AuditQuery(kind="key"))
            changed, created = page.items
            assert (changed.entry.actor, changed.entry.request_id, changed.entry.id) == (
                *("cli", "req-2"),
                issued.document.id,
            )
            assert changed.before is not None
            assert changed.after is not None
            assert (changed.before["role"], changed.after["role"], created.before) == ("infer", "viewer", None)
            everything = repr(page.items)
            for secret in (issued.text, issued.document.doc.sha256):
                assert secret not in everything

    run(scenario)


def test_a_tenants_admin_reads_only_that_tenants_entries(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("secret", "x", GLOBEX)
            await node.publish("sql", "y")
            found = (await trail(node).list(ACME_ADMIN, AuditQuery())).items
            assert {act.entry.tenant for act in found} == {"acme"}
            everybody = (await trail(node).list(ADMIN, AuditQuery())).items
            assert {"acme", "globex"} <= {act.entry.tenant for act in everybody}
            with pytest.raises(ServingError) as refused:
                await trail(node).list(Principal("k", Role.OPERATOR, "acme", "acme", "k"), AuditQuery())
            assert refused.value.code is ErrorCode.FORBIDDEN

    run(scenario)


def test_a_key_for_some_adapters_does_not_read_entries_of_others(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("secret", "x")
            await node.publish("sql", "y")
            narrow = replace(ACME_ADMIN, adapters=frozenset({"sql"}))
            found = (await trail(node).list(narrow, AuditQuery())).items
            assert [act.entry.id for act in found if act.entry.kind == "adapter"] == ["acme/sql"]
            assert "secret" not in repr(found)

    run(scenario)


def test_entries_are_filtered_and_paged(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            for number in range(5):
                await node.keys.create(ACME, f"req-{number}", role=Role.INFER)
            found: list[str] = []
            cursor: str | None = None
            while True:
                page = await trail(node).list(ADMIN, AuditQuery(action="key.", limit=2, cursor=cursor))
                found += [act.entry.request_id for act in page.items]
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert found == [f"req-{number}" for number in reversed(range(5))]
            assert len([*await trail(node).export(ADMIN, AuditQuery(action="key.create", actor="cli"))]) == 5
            assert [*await trail(node).export(ADMIN, AuditQuery(action="key"))] == []
            for made_up in ("x", f"{10**20 - 1}-0", f"0-{2**64}", "0-0", "00-000"):
                with pytest.raises(ServingError) as refused:
                    await trail(node).list(ADMIN, AuditQuery(cursor=encode_cursor(made_up)))
                assert refused.value.param == "cursor"

    run(scenario)


def test_an_export_reads_documents_only_as_it_is_consumed(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            for _ in range(3):
                await node.keys.create(ACME, "r", role=Role.INFER)
            read: list[int] = []
            revision = node.documents.revision

            def noted(kind: DocumentKind, document_id: str, rev: int) -> AnyDocument | None:
                read.append(rev)
                return revision(kind, document_id, rev)

            monkeypatch.setattr(node.documents, "revision", noted)
            query = AuditQuery(kind="key")
            assert [act.after for act in await trail(node).export(ADMIN, query, with_documents=False)] == [None] * 3
            assert read == []
            acts = iter(await trail(node).export(ADMIN, query))
            assert read == []
            assert next(acts).after is not None
            assert read == [0, 1]

    run(scenario)


def test_a_page_of_large_documents_is_shorter_and_continues_at_its_cursor(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_trail, "MAX_PAGE_BYTES", 2000)

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            for number, num_adapters in enumerate((1, 1, 100, 100, 1, 1)):
                adapters = frozenset(f"adapter-{each:032}" for each in range(num_adapters))
                await node.keys.create(ACME, f"req-{number}", role=Role.INFER, adapters=adapters)
            pages: list[list[str]] = []
            cursor: str | None = None
            while cursor is not None or not pages:
                page = await trail(node).list(ADMIN, AuditQuery(kind="key", limit=6, cursor=cursor))
                pages.append([act.entry.request_id for act in page.items])
                cursor = page.next_cursor
            assert pages == [["req-5", "req-4", "req-3"], ["req-2"], ["req-1", "req-0"]]

    run(scenario)


def test_refusals_are_recorded_but_deduplicated_and_limited_per_hour(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            steady = Clock()
            refusals = Refusals(node.live, steady=steady)

            async def note(subject: str, actor: str = "unknown", tenant: str = "*") -> int:
                refusals.note(
                    actor=actor,
                    tenant=tenant,
                    address="1.2.3.4",
                    subject=subject,
                    kind="request",
                    code=ErrorCode.FORBIDDEN,
                    request_id="r",
                )
                await refusals.close()
                return len([*await trail(node).export(ADMIN, AuditQuery(kind="request"))])

            assert [await note("GET /v1/keys"), await note("GET /v1/keys")] == [1, 1]
            assert await note("GET /v1/keys", "key-1") == 2
            (act, *_) = await trail(node).export(ADMIN, AuditQuery(kind="request", actor="unknown"))
            assert act.was_refused
            assert (act.entry.id, act.entry.detail, act.before) == ("GET /v1/keys", "1.2.3.4: forbidden", None)
            steady.now += DEDUPLICATE_S
            assert await note("GET /v1/keys") == 3
            for number in range(2 * MAX_PER_HOUR):
                await note(f"GET /{number}")
            num_noted = 1 + MAX_PER_HOUR
            assert await note("GET /one-more") == num_noted
            # Callers without a key leave room for those with one, and each tenant leaves room for the others.
            for number in range(2 * MAX_PER_HOUR):
                await note(f"GET /{number}", "key-1", "acme")
            num_noted += MAX_PER_HOUR
            assert await note("GET /one-more", "key-2", "acme") == num_noted
            assert await note("GET /one-more", "key-3", "globex") == num_noted + 1
            steady.now += HOUR_S - DEDUPLICATE_S - 1
            assert await note("GET /one-more") == num_noted + 1
            steady.now += 1
            assert await note("GET /one-more") == num_noted + 2

    run(scenario)

import asyncio
from pathlib import Path

import pytest

from loraserve.control.documents.adapter_edits import RESTORABLE_S
from loraserve.control.documents.tenant_edits import TenantState
from loraserve.control.requests.running import Demand
from loraserve.control.tenancy.offline_keys import create_key_offline
from loraserve.control.tenancy.principal import Principal
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT, Document, DocumentKind, Limits, Pin, Role, TenantDoc, Tier
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import (
    ACME,
    ADMIN,
    DONE,
    Node,
    content,
    eventually,
    run,
    running_node,
    two_nodes,
    with_tenants,
)
from tests.unit.control.requests.test_draining import two_telling

__all__ = ["valkey"]

ACME_ADMIN = Principal("k", Role.ADMIN, "acme", "acme")
GLOBEX = Principal("cli", Role.ADMIN, ANY_TENANT, "globex")


async def state_of(node: Node, tenant: str = "acme") -> TenantState:
    return node.tenant_deletion.state_of(await node.tenants.read(ADMIN, tenant))


def test_a_deleted_tenants_keys_are_unknown_and_no_key_can_act_for_it(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_telling(tmp_path / "data", valkey.url) as (one, two):
            key = (await one.keys.create(ACME, "r", role=Role.OPERATOR)).text
            everywhere = (await one.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)).text
            await eventually(lambda: not two.authenticator.is_open)
            key_id = (await two.authenticator.authenticate(key)).actor
            assert (await one.tenant_deletion.delete(ADMIN, "r", "acme")).drained
            unknown = await _refusal(one, "ls-abcdefgh_" + "x" * 43)
            for node in (one, two):
                await eventually(lambda node=node: node.catalog.is_deleted("acme"))
                assert await _refusal(node, key) == unknown
                with pytest.raises(ServingError) as refused:
                    await node.authenticator.of_key(key_id)
                assert refused.value.code is ErrorCode.INVALID_API_KEY
                with pytest.raises(ServingError) as refused:
                    await node.authenticator.authenticate(everywhere, "acme")
                assert refused.value.code is ErrorCode.NOT_FOUND
            with pytest.raises(ServingError) as refused:
                await two.keys.create(ADMIN, "r", role=Role.INFER, tenant="acme")
            assert refused.value.code is ErrorCode.NOT_FOUND
            with pytest.raises(ServingError) as refused:
                create_key_offline(two.documents, role=Role.INFER, tenant="acme")
            assert refused.value.message == "The tenant 'acme' was deleted."

    run(scenario)


def test_a_server_that_has_not_heard_of_the_deletion_refuses_the_next_request(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            key = (await one.keys.create(ACME, "r", role=Role.INFER)).text
            await two.catalog.catch_up()
            principal = await two.authenticator.authenticate(key)
            target = await two.resolver.resolve(principal, "tiny")
            await one.tenant_deletion.delete(ADMIN, "r", "acme")
            assert not two.catalog.is_deleted("acme")
            for who, code in ((principal, ErrorCode.INVALID_API_KEY), (ACME, ErrorCode.NOT_FOUND)):
                with pytest.raises(ServingError) as refused:
                    await two.admission.admit(who, target, f"late-{code}", Demand(1), two.steady())
                assert refused.value.code is code

    run(scenario)


async def _refusal(node: Node, key: str) -> tuple[ErrorCode, str]:
    with pytest.raises(ServingError) as refused:
        await node.authenticator.authenticate(key)
    return refused.value.code, refused.value.message


def test_a_deleted_tenants_documents_are_not_listed_and_its_contents_not_loaded(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.keys.create(ACME, "r", role=Role.INFER)
            digest = await node.publish("sql", "one")
            await node.adapters.pin(ACME, "r", "sql", Tier.HOST, 60)
            await node.pins.keep()
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            assert [found.id for found in node.tenants.list(ADMIN).items] == ["default", "globex", "shared"]
            assert [found.id for found in node.tenants.list(ADMIN, deleted=True).items] == ["acme"]
            assert node.keys.list(ADMIN).items == []
            assert node.catalog.all_adapters() == node.catalog.adapters("acme") == []
            assert node.catalog.adapter("acme", "sql") is None
            assert not node.residency.is_wanted(digest)
            await eventually(lambda: digest not in node.engine.known)
            await node.pins.keep()
            assert digest not in node.engine.known
            with pytest.raises(ServingError) as refused:
                node.quota.check("acme", "other", 1)
            assert refused.value.code is ErrorCode.NOT_FOUND
            # Holdings still include what restoring it would bring back.
            assert node.tenants.holdings("acme").num_adapters == node.tenants.holdings("acme").num_keys == 1

    run(scenario)


def test_deletion_ends_running_requests_on_every_server_and_waits_for_them(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.control.requests.draining.POLL_OTHERS_EVERY_S", 0.01)

    async def scenario() -> None:
        async with two_telling(tmp_path / "data", valkey.url) as (one, two):
            await one.publish("sql", "one")
            key = (await one.keys.create(ACME, "r", role=Role.INFER)).text
            await eventually(lambda: not two.authenticator.is_open)  # on a server without keys every caller is admin
            running = [
                await one.admit(await one.authenticator.authenticate(key), "sql"),
                await two.admit(await two.authenticator.authenticate(key)),
                await two.admit(ACME),
            ]
            beside = await two.admit(GLOBEX)
            deletion = asyncio.create_task(one.tenant_deletion.delete(ADMIN, "r", "acme"))
            await eventually(lambda: all(admitted.running.ended_with is not None for admitted in running))
            errors = [admitted.running.ended_with for admitted in running]
            assert {error.code for error in errors if error} == {ErrorCode.NOT_FOUND}
            assert {error.message for error in errors if error} == {
                "The tenant 'acme' was deleted while the request ran."
            }
            assert beside.running.ended_with is None
            assert await state_of(one) is TenantState.DRAINING
            await one.admission.finish(running[0], DONE)
            await two.admission.finish(running[1], DONE)
            told = two.clock.now + 0.1
            await eventually(lambda: two.clock.now >= told)
            assert not deletion.done()
            await two.admission.finish(running[2], DONE)
            assert (await deletion).drained
            assert await state_of(one) is TenantState.DELETED

    run(scenario)


def test_a_deletion_that_did_not_drain_reports_so_and_can_be_repeated(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.control.requests.draining.ACK_WAIT_S", 0.1)
    monkeypatch.setattr("loraserve.control.requests.draining.POLL_OTHERS_EVERY_S", 0.01)

    async def scenario() -> None:
        async with two_telling(tmp_path / "data", valkey.url) as (one, two):
            admitted = await two.admit(ACME)
            first = await one.tenant_deletion.delete(ADMIN, "r", "acme")
            assert (first.drained, first.state) == (False, TenantState.DRAINING)
            await two.admission.finish(admitted, DONE)
            monkeypatch.undo()  # A busy machine may take longer than a tenth of a second to report it.
            again = await one.tenant_deletion.delete(ADMIN, "r", "acme")
            assert (again.drained, again.state) == (True, TenantState.DELETED)
            # The repeated call changes nothing, so the 24 hours do not start again.
            assert again.document == first.document

    run(scenario)


def test_deletion_waits_for_a_request_between_admission_and_start(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            with node.running.entering(ACME, 1):
                deletion = asyncio.create_task(node.tenant_deletion.delete(ADMIN, "r", "acme"))
                await eventually(lambda: node.catalog.is_deleted("acme"))
                assert await state_of(node) is TenantState.DRAINING
                assert not deletion.done()
            assert (await deletion).drained

    run(scenario)


def test_restoring_brings_a_tenant_back_unchanged_on_every_server(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_telling(tmp_path / "data", valkey.url) as (one, two):
            await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(max_queued=9)))
            before = await one.tenants.read(ADMIN, "acme")
            key = (await one.keys.create(ACME, "r", role=Role.INFER)).text
            digest = await one.publish("sql", "one")
            await one.adapters.pin(ACME, "r", "sql", Tier.HOST, 3 * RESTORABLE_S)
            pinned = one.catalog.adapter("acme", "sql")
            await one.tenant_deletion.delete(ADMIN, "r", "acme")
            await eventually(lambda: two.catalog.is_deleted("acme"))
            one.clock.now += RESTORABLE_S - 60
            restored = await two.tenant_deletion.restore(ADMIN, "r", "acme")
            assert restored.doc == before.doc
            await eventually(lambda: not one.catalog.is_deleted("acme"))
            for node in (one, two):
                admitted = await node.admit(await node.authenticator.authenticate(key), "sql")
                assert admitted.target.adapter is not None
                assert admitted.target.adapter.digest == digest
                assert node.catalog.adapter("acme", "sql") == pinned
                await node.pins.keep()
                assert digest in node.engine.known
            assert isinstance(pinned and pinned.doc.pin, Pin)
            # Restoring it again changes nothing.
            assert await two.tenant_deletion.restore(ADMIN, "r", "acme") == restored

    run(scenario)


def test_a_tenant_cannot_be_restored_after_a_day(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            node.clock.now = 1_795_301_684.0
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            with pytest.raises(ServingError) as refused:
                await node.tenants.create(ADMIN, "r", "acme")
            assert refused.value.code is ErrorCode.CONFLICT
            assert "was deleted 2026-11-21 22:54 UTC and can be restored until 2026-11-22" in refused.value.message
            assert "POST /v1/tenants/acme/restore" in refused.value.message
            node.clock.now += RESTORABLE_S
            for call in (node.tenant_deletion.restore(ADMIN, "r", "acme"), node.tenants.create(ADMIN, "r", "acme")):
                with pytest.raises(ServingError) as refused:
                    await call
                assert refused.value.code is ErrorCode.CONFLICT
                assert "deleted 2026-11-21 22:54 UTC" in refused.value.message
                assert "POST" not in refused.value.message

    run(scenario)


def test_unauthorized_deletions_and_deletions_of_builtin_tenants_are_refused(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            deletion = node.tenant_deletion
            for tenant, principal, code in (
                ("acme", ACME_ADMIN, ErrorCode.FORBIDDEN),
                ("globex", ACME_ADMIN, ErrorCode.FORBIDDEN),
                ("default", ADMIN, ErrorCode.CONFLICT),
                ("shared", ADMIN, ErrorCode.CONFLICT),
                ("missing", ADMIN, ErrorCode.NOT_FOUND),
            ):
                with pytest.raises(ServingError) as refused:
                    await deletion.delete(principal, "r", tenant)
                assert refused.value.code is code
            for principal, tenant, code in (
                (ACME_ADMIN, "acme", ErrorCode.FORBIDDEN),
                (ADMIN, "missing", ErrorCode.NOT_FOUND),
            ):
                with pytest.raises(ServingError) as refused:
                    await deletion.restore(principal, "r", tenant)
                assert refused.value.code is code
            with pytest.raises(ServingError) as refused:
                await deletion.delete(ADMIN, "r", "acme", expected_rev=7)
            assert refused.value.code is ErrorCode.PRECONDITION_FAILED
            assert not node.catalog.is_deleted("acme")
            await deletion.delete(ADMIN, "r", "acme", expected_rev=1)
            with pytest.raises(ServingError) as refused:
                await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(weight=2))
            assert refused.value.code is ErrorCode.NOT_FOUND

    run(scenario)


def test_an_upload_committed_after_the_deletion_publishes_nothing(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            with pytest.raises(ServingError) as refused:
                await node.versions.publish(ACME, "r", "sql", content("a" * 64))
            assert refused.value.code is ErrorCode.NOT_FOUND
            assert node.documents.get(DocumentKind.ADAPTER, "acme/sql") is None

    run(scenario)


def test_a_server_killed_right_after_the_commit_leaves_a_deleted_tenant(valkey: Valkey, tmp_path: Path) -> None:
    """Neither Redis nor another server was notified."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            key = (await node.keys.create(ACME, "r", role=Role.INFER)).text
            current = await node.tenants.read(ADMIN, "acme")
            doc = TenantDoc(kv_salt=current.doc.kv_salt, deleted_at=node.clock.now)
            node.documents.commit(_next(current, doc))
            # A server that keeps running hears of it once the deletion is repeated …
            await node.authenticator.authenticate(key)
            assert (await node.tenant_deletion.delete(ADMIN, "r", "acme")).document.rev == 2
            assert (await _refusal(node, key))[0] is ErrorCode.INVALID_API_KEY
        # … and a server that starts reads it from disk.
        async with running_node(tmp_path / "data", valkey.url) as again:
            assert again.catalog.is_deleted("acme")
            assert (await _refusal(again, key))[0] is ErrorCode.INVALID_API_KEY
            assert (await again.live.documents.all_revs(DocumentKind.TENANT))["acme"] == 2

    run(scenario)


def _next(current: Document[TenantDoc], doc: TenantDoc) -> Document[TenantDoc]:
    return Document(
        kind=DocumentKind.TENANT,
        id=current.id,
        rev=current.rev + 1,
        at=current.at,
        actor="k",
        action="tenant.delete",
        request_id="r",
        deleted=True,
        doc=doc,
    )


def test_a_tenant_restored_on_another_server_works_here_at_once(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url) as one, running_node(data_dir, valkey.url, follow=False) as deaf:
            await with_tenants(one)
            await one.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            issued = await one.keys.create(ACME, "r", role=Role.INFER)
            await one.tenant_deletion.delete(ADMIN, "r", "acme")
            await deaf.catalog.catch_up()
            assert await _refusal(deaf, issued.text) == await _refusal(deaf, "ls-abcdefgh_" + "x" * 43)
            await one.tenant_deletion.restore(ADMIN, "r", "acme")
            assert (await deaf.authenticator.authenticate(issued.text)).key_id == issued.document.id
            assert (await deaf.authenticator.of_key(issued.document.id)).acting_tenant == "acme"

    run(scenario)


def test_a_deleted_tenants_key_is_refused_even_if_it_is_also_a_flag_key(valkey: Valkey, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            await one.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            key = (await one.keys.create(ACME, "r", role=Role.INFER)).text
            async with running_node(data_dir, valkey.url, flag_keys=(key,)) as two:
                assert (await two.authenticator.authenticate(key)).acting_tenant == "acme"
                await two.tenant_deletion.delete(ADMIN, "r", "acme")
                assert await _refusal(two, key) == await _refusal(two, "ls-abcdefgh_" + "x" * 43)

    run(scenario)

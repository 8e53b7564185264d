import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from loraserve.control.adapters.queries import AdapterQuery, AdapterSort, AdapterState
from loraserve.control.adapters.service import AdapterPatch
from loraserve.control.documents.adapter_edits import RESTORABLE_S, CanaryShare, wants
from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.offline_keys import revoke_key_offline
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.blobs import SWEPT_WITHIN_S
from loraserve.store.records import DocumentKind, Limits, Role, Status, Tier, adapter_id
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

__all__ = ["valkey"]

GLOBEX = server_principal("globex", "cli")
SHARED = server_principal("shared", "config")


def test_the_first_version_becomes_live_and_later_ones_only_if_activated(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            first = await node.versions.publish(ACME, "r", "sql", content("a" * 64), activate=False)
            assert (first.created, first.version.n, first.document.doc.aliases["live"].version) == (True, 1, 1)
            second = await node.versions.publish(ACME, "r", "sql", content("b" * 64), activate=False)
            assert second.document.doc.aliases["live"].version == 1
            third = await node.versions.publish(ACME, "r", "sql", content("c" * 64))
            live = third.document.doc.aliases["live"]
            assert (live.version, live.previous) == (3, 1)
            assert [version.n for version in (await node.versions.list(ACME, "sql"))[1]] == [3, 2, 1]

    run(scenario)


def test_publishing_the_same_upload_or_content_again_returns_the_same_version(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            upload = content("a" * 64, "upload-1")
            first = await node.versions.publish(ACME, "r", "sql", upload)
            await node.versions.publish(ACME, "r", "sql", content("b" * 64))
            # A commit that is repeated after a crash does not move the alias back.
            again = await node.versions.publish(ACME, "r", "sql", upload)
            assert (again.created, again.version.n) == (False, first.version.n)
            assert again.document.doc.aliases["live"].version == 2
            # The same files in another upload do, if they are to be activated.
            same = await node.versions.publish(ACME, "r", "sql", content("a" * 64))
            assert (same.created, same.version.n, same.document.doc.aliases["live"].version) == (False, 1, 1)
            # Another adapter has its own version of the same content.
            other = await node.versions.publish(GLOBEX, "r", "sql", content("a" * 64))
            assert (other.created, other.version.n) == (True, 1)

    run(scenario)


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        ("revoked", ErrorCode.INVALID_API_KEY),
        ("revoked offline", ErrorCode.INVALID_API_KEY),
        ("suspended", ErrorCode.INVALID_API_KEY),
        ("expired", ErrorCode.INVALID_API_KEY),
        ("its tenant suspended", ErrorCode.TENANT_SUSPENDED),
        ("its tenant deleted", ErrorCode.INVALID_API_KEY),
        ("another role", ErrorCode.FORBIDDEN),
        ("other adapters", ErrorCode.FORBIDDEN),
    ],
)
def test_a_principal_that_has_lost_the_right_to_publish_publishes_nothing(
    valkey: Valkey, tmp_path: Path, lost: str, code: ErrorCode
) -> None:
    """Also on a server that has not heard of the loss yet."""

    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            issued = await one.keys.create(ACME, "r", role=Role.OPERATOR, expires_at=one.clock() + 60)
            await two.catalog.catch_up()
            principal, key_id = await two.authenticator.authenticate(issued.text), issued.document.id
            await two.versions.publish(principal, "r", "sql", content("a" * 64))
            match lost:
                case "revoked":
                    await one.keys.revoke(ACME, "r", key_id)
                case "revoked offline":
                    revoke_key_offline(one.documents, key_id)
                case "expired":
                    two.clock.now += 61
                case "its tenant suspended":
                    await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(status=Status.SUSPENDED))
                case "its tenant deleted":
                    await one.tenant_deletion.delete(ADMIN, "r", "acme")
                case _:
                    patches = {
                        "suspended": KeyPatch(status=Status.SUSPENDED),
                        "another role": KeyPatch(role=Role.VIEWER),
                        "other adapters": KeyPatch(adapters=["math"]),
                    }
                    await one.keys.patch(ACME, "r", key_id, patches[lost])
            with pytest.raises(ServingError) as refused:
                await two.versions.publish(principal, "r", "sql", content("b" * 64))
            assert refused.value.code is code
            document = two.documents.get(DocumentKind.ADAPTER, adapter_id("acme", "sql"))
            assert document is not None
            assert document.rev == 1

    run(scenario)


def test_callers_of_an_open_server_and_server_principals_can_publish(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            anyone = await node.authenticator.authenticate(None)
            for n, principal in enumerate((anyone, ACME, SHARED)):
                assert (await node.versions.publish(principal, "r", f"a{n}", content("a" * 64))).created

    run(scenario)


@pytest.mark.parametrize("name", ["tiny", "", "../x", "a b", "x" * 65, "a/b", "a@b"])
def test_invalid_adapter_names_are_refused(valkey: Valkey, tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            with pytest.raises(ServingError) as refused:
                await node.versions.publish(ACME, "r", name, content("a" * 64))
            assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_VALUE, "name")

    run(scenario)


def test_quotas_are_enforced_and_deleting_makes_room_for_another_adapter(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            limits = Limits(max_adapters=2, max_adapter_bytes=350)
            await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=limits))
            await node.versions.publish(ACME, "r", "a", content("a" * 64))
            await node.versions.publish(ACME, "r", "b", content("b" * 64))
            for name, size_bytes in (("c", 100), ("b", 151)):
                with pytest.raises(ServingError) as refused:
                    await node.versions.publish(ACME, "r", name, content("c" * 64, size_bytes=size_bytes))
                assert refused.value.code is ErrorCode.INSUFFICIENT_QUOTA
            assert node.tenants.holdings("acme").adapter_bytes == 200
            await node.adapters.delete(ACME, "r", "a", drain_s=0)
            await node.versions.publish(ACME, "r", "c", content("c" * 64))
            with pytest.raises(ServingError) as refused:
                await node.adapters.restore(ACME, "r", "a")
            assert refused.value.code is ErrorCode.INSUFFICIENT_QUOTA

    run(scenario)


def test_deleted_versions_count_against_the_quota_while_they_are_on_disk(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(max_adapter_bytes=250)))

            async def publish(name: str, digest: str) -> None:
                await node.versions.publish(ACME, "r", name, content(digest * 64), activate=False)

            async def refused(name: str, digest: str) -> str:
                with pytest.raises(ServingError) as error:
                    await publish(name, digest)
                assert error.value.code is ErrorCode.INSUFFICIENT_QUOTA
                return error.value.message

            await publish("a", "1")
            await publish("a", "2")
            # A deleted version that was published recently.
            await node.versions.delete(ACME, "r", "a", 2)
            for name in "ab":
                message = await refused(name, "3")
                assert "100 bytes belong to deleted versions" in message
                assert f"at {utc(node.clock.now + SWEPT_WITHIN_S)}" in message
            node.clock.now += SWEPT_WITHIN_S
            await publish("a", "3")
            # One that was published longer ago.
            node.clock.now += SWEPT_WITHIN_S
            await node.versions.delete(ACME, "r", "a", 3)
            await publish("b", "3")
            # A deleted adapter, which can still be restored.
            await node.adapters.delete(ACME, "r", "a", drain_s=0)
            assert node.tenants.holdings("acme").adapter_bytes == 200
            assert f"at {utc(node.clock.now + RESTORABLE_S)}" in await refused("c", "4")
            await node.adapters.restore(ACME, "r", "a")
            await node.adapters.delete(ACME, "r", "a", drain_s=0)
            node.clock.now += RESTORABLE_S
            await publish("c", "4")

    run(scenario)


def test_deleted_versions_are_dropped_with_their_contents_and_their_numbers_are_never_reused(
    valkey: Valkey, tmp_path: Path
) -> None:
    """Otherwise the document of an adapter published every hour would grow forever, in each of its revisions."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            newest = await node.versions.publish(ACME, "r", "sql", content("1" * 64))
            for n in range(2, 8):
                newest = await node.versions.publish(ACME, "r", "sql", content(f"{n}" * 64))
                assert newest.version.n == n
                await node.versions.delete(ACME, "r", "sql", n - 1)
                node.clock.now += SWEPT_WITHIN_S / 2
            assert [version.n for version in newest.document.doc.versions] == [6, 7]
            await node.adapters.delete(ACME, "r", "sql", drain_s=0)
            node.clock.now += RESTORABLE_S
            again = await node.versions.publish(ACME, "r", "sql", content("a" * 64))
            assert [version.n for version in again.document.doc.versions] == [8]

    run(scenario)


def test_an_upload_reuses_the_quota_of_a_deleted_adapter_with_the_same_name(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(max_adapter_bytes=150)))
            await node.versions.publish(ACME, "r", "a", content("1" * 64))
            await node.adapters.delete(ACME, "r", "a", drain_s=0)
            with pytest.raises(ServingError) as refused:
                await node.versions.publish(ACME, "r", "a", content("2" * 64))
            assert refused.value.code is ErrorCode.INSUFFICIENT_QUOTA, "it has only just been uploaded"
            node.clock.now += SWEPT_WITHIN_S
            await node.versions.publish(ACME, "r", "a", content("2" * 64))
            assert node.tenants.holdings("acme").adapter_bytes == 100

    run(scenario)


def utc(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def test_rollback_swaps_versions_and_a_second_rollback_undoes_it(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            with pytest.raises(ServingError) as refused:
                await node.aliases.rollback(ACME, "r", "sql")
            assert refused.value.code is ErrorCode.CONFLICT
            await node.publish("sql", "two")
            await node.aliases.put(ACME, "r", "sql", "live", 2, canary=CanaryShare(1, 5000))
            back = (await node.aliases.rollback(ACME, "r", "sql")).doc.aliases["live"]
            assert (back.version, back.previous, back.canary) == (1, 2, None)
            undone = (await node.aliases.rollback(ACME, "r", "sql")).doc.aliases["live"]
            assert (undone.version, undone.previous) == (2, 1)

    run(scenario)


def test_a_version_used_by_an_alias_or_canary_cannot_be_deleted(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            for text in ("one", "two", "three"):
                await node.publish("sql", text)
            await node.aliases.put(ACME, "r", "sql", "next", 1, canary=CanaryShare(2, 1))
            for n in (1, 2, 3):
                with pytest.raises(ServingError) as refused:
                    await node.versions.delete(ACME, "r", "sql", n)
                assert refused.value.code is ErrorCode.CONFLICT
            await node.aliases.delete(ACME, "r", "sql", "next")
            document = await node.versions.delete(ACME, "r", "sql", 2)
            # Version 2 was also the rollback target of live.
            assert document.doc.aliases["live"].previous is None
            with pytest.raises(ServingError) as refused:
                await node.versions.delete(ACME, "r", "sql", 2)
            assert refused.value.code is ErrorCode.NOT_FOUND
            with pytest.raises(ServingError) as refused:
                await node.aliases.delete(ACME, "r", "sql", "live")
            assert refused.value.code is ErrorCode.CONFLICT
            await node.publish("sql", "two")
            assert [version.n for version in (await node.versions.list(ACME, "sql"))[1]] == [4, 3, 1]

    run(scenario)


def test_keep_versions_keeps_the_newest_versions_and_those_in_use(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, keep_versions=2) as node:
            await with_tenants(node)
            first = await node.publish("sql", "1")
            await node.publish("sql", "2")
            await node.publish("sql", "3", activate=False)
            assert await kept(node) == [1, 2, 3]  # 1 is the rollback target of 2
            await node.publish("sql", "4", activate=False)
            await node.publish("sql", "5", activate=False)
            assert await kept(node) == [1, 2, 4, 5]
            await node.aliases.put(ACME, "r", "sql", "live", 2, canary=CanaryShare(4, 100))
            await node.aliases.put(ACME, "r", "sql", "next", 5)
            for text in ("6", "7", "8"):
                await node.publish("sql", text, activate=False)
            assert await kept(node) == [1, 2, 4, 5, 7, 8]
            await node.publish("sql", "9")
            assert await kept(node) == [2, 5, 8, 9]
            document = node.catalog.adapter("acme", "sql")
            assert document is not None
            assert first not in wants(document.doc, now=node.clock.now, restorable=True)
            # Publishing the same content again creates no new version.
            await node.publish("sql", "5")
            assert await kept(node) == [2, 5, 8, 9]

    run(scenario)


async def kept(node: Node) -> list[int]:
    _, versions = await node.versions.list(ACME, "sql")
    return sorted(version.n for version in versions)


def test_other_tenants_adapters_are_not_found_and_shared_ones_are_read_only(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "shared", SHARED)
            await node.publish("secret", "globex", GLOBEX)
            assert (await node.adapters.read(ACME, "sql")).doc.tenant == "shared"
            with pytest.raises(ServingError) as refused:
                await node.adapters.patch(ACME, "r", "sql", AdapterPatch(description="mine"))
            assert refused.value.code is ErrorCode.FORBIDDEN
            messages: set[str] = set()
            for name in ("secret", "missing"):
                with pytest.raises(ServingError) as refused:
                    await node.adapters.read(ACME, name)
                messages.add(refused.value.message.replace(name, "<name>"))
                for call in (
                    node.adapters.patch(ACME, "r", name, AdapterPatch(description="mine")),
                    node.adapters.delete(ACME, "r", name),
                    node.adapters.restore(ACME, "r", name),
                    node.aliases.rollback(ACME, "r", name),
                    node.versions.delete(ACME, "r", name, 1),
                    node.adapters.pin(ACME, "r", name, Tier.HOST, 10),
                ):
                    with pytest.raises(ServingError) as refused:
                        await call
                    assert refused.value.code is ErrorCode.ADAPTER_NOT_FOUND
                    messages.add(refused.value.message.replace(name, "<name>"))
            assert len(messages) == 1

    run(scenario)


def listed(node: Node, principal: Principal, state: AdapterState | None = None) -> list[str]:
    return [document.id for document in node.adapters.list(principal, AdapterQuery(state=state)).items]


def test_a_deleted_adapter_does_not_hide_a_shared_one(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "shared", SHARED)
            await node.publish("sql", "own")
            assert (await node.adapters.read(ACME, "sql", with_deleted=True)).doc.tenant == "acme"
            await node.adapters.delete(ACME, "r", "sql", drain_s=0)
            for document in (
                await node.adapters.read(ACME, "sql", with_deleted=True),
                node.adapters.list(ACME).items[0],
            ):
                assert (document.doc.tenant, document.doc.deleted_at) == ("shared", None)
            assert listed(node, ACME) == ["shared/sql"]
            assert listed(node, ACME, AdapterState.DELETED) == ["acme/sql"], "it can be restored"
            await node.adapters.delete(SHARED, "r", "sql", drain_s=0)
            assert (await node.adapters.read(ACME, "sql", with_deleted=True)).doc.tenant == "acme"
            assert listed(node, ACME, AdapterState.DELETED) == ["acme/sql"]
            assert listed(node, SHARED, AdapterState.DELETED) == ["shared/sql"]
            await node.adapters.restore(ACME, "r", "sql")
            assert listed(node, ACME) == ["acme/sql"]
            assert listed(node, ACME, AdapterState.DELETED) == []

    run(scenario)


def test_lists_are_filtered_sorted_and_paged(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            for number, name in enumerate(["delta", "alpha", "charlie", "bravo"]):
                node.clock.now += 1
                await node.versions.publish(ACME, "r", name, content(str(number) * 64, size_bytes=number))
            await node.adapters.patch(ACME, "r", "alpha", AdapterPatch(tags=["prod", "prod"], description="First"))
            await node.adapters.patch(ACME, "r", "bravo", AdapterPatch(enabled=False))
            await node.adapters.delete(ACME, "r", "delta", drain_s=0)

            def names(query: AdapterQuery, principal: Principal = ACME) -> list[str]:
                return [found.doc.name for found in node.adapters.list(principal, query).items]

            assert names(AdapterQuery()) == ["alpha", "bravo", "charlie"]
            assert names(AdapterQuery(q="FIRST")) == ["alpha"]
            assert names(AdapterQuery(q="a", tag="prod")) == ["alpha"]
            assert names(AdapterQuery(state=AdapterState.DISABLED)) == ["bravo"]
            assert names(AdapterQuery(state=AdapterState.DELETED)) == ["delta"]
            assert names(AdapterQuery(sort=AdapterSort.LARGEST)) == ["bravo", "charlie", "alpha"]
            assert names(AdapterQuery(sort=AdapterSort.NEWEST)) == ["bravo", "charlie", "alpha"]
            listed = Principal("k", Role.VIEWER, "acme", "acme", adapters=frozenset({"charlie"}))
            assert names(AdapterQuery(), listed) == ["charlie"]
            assert names(AdapterQuery(), GLOBEX) == []
            page = node.adapters.list(ACME, AdapterQuery(limit=2))
            assert page.next_cursor is not None
            assert names(AdapterQuery(limit=2, cursor=page.next_cursor)) == ["charlie"]
            assert node.adapters.list(ACME, AdapterQuery(limit=3)).next_cursor is None
            await node.adapters.delete(ACME, "r", "bravo", drain_s=0)
            assert names(AdapterQuery(limit=2, cursor=page.next_cursor)) == ["charlie"], "its last item may be gone"
            by_size = AdapterQuery(sort=AdapterSort.LARGEST, cursor=page.next_cursor)
            for query, param in (
                (AdapterQuery(limit=501), "limit"),
                (AdapterQuery(cursor="!"), "cursor"),
                (by_size, "cursor"),
            ):
                with pytest.raises(ServingError) as refused:
                    node.adapters.list(ACME, query)
                assert refused.value.param == param

    run(scenario)


def test_deletion_hides_an_adapter_at_once_and_waits_for_running_requests(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            admitted = await node.admit(ACME, "sql")
            async with node.residency.hold(digest):
                deletion = asyncio.create_task(node.adapters.delete(ACME, "r", "sql", drain_s=60))
                await eventually(lambda: all(found.deleted for found in node.catalog.adapters("acme")))
                with pytest.raises(ServingError) as refused:
                    await node.admit(ACME, "sql")
                assert refused.value.code is ErrorCode.MODEL_NOT_FOUND
                document = await node.adapters.read(ACME, "sql", with_deleted=True)
                assert node.adapters.state_of(document) is AdapterState.DRAINING
                assert node.engine.unloads == []
                assert admitted.running.ended_with is None
            await node.admission.finish(admitted, DONE)
            assert (await deletion).drained
            assert node.engine.unloads == [digest]
            assert node.adapters.state_of(document) is AdapterState.DELETED
            await node.adapters.restore(ACME, "r", "sql")
            async with node.residency.hold(digest):
                assert node.engine.known.keys() == {digest}

    run(scenario)


def test_requests_still_running_at_the_deadline_of_a_deletion_are_aborted(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url) as node, running_node(data_dir, valkey.url) as other:
            await with_tenants(node)
            await node.publish("sql", "one")
            errors: list[ServingError] = []
            for server in (node, other):
                admitted = await server.admit(ACME, "sql")

                def end(error: ServingError, server=server, admitted=admitted) -> None:
                    errors.append(error)
                    server.running.remove(admitted.request_id)

                admitted.running.on_abort(end)
            deletion = await node.adapters.delete(ACME, "r", "sql", drain_s=0.01)
            assert deletion.drained
            other.clock.now += 1
            await eventually(lambda: len(errors) == 2)
            assert {error.code for error in errors} == {ErrorCode.MODEL_NOT_FOUND}

    run(scenario)


@pytest.mark.parametrize("comes_back", ["restored", "published anew"])
def test_a_deletion_that_was_undone_aborts_no_running_request(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: str
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            admitted = [await node.admit(ACME, "sql")]
            is_undone = asyncio.Event()

            async def wait_too_long(*_: object) -> bool:
                await is_undone.wait()
                return False

            monkeypatch.setattr(node.running, "wait_while", wait_too_long)
            deletion = asyncio.create_task(node.adapters.delete(ACME, "r", "sql", drain_s=30))
            await eventually(lambda: all(found.deleted for found in node.catalog.adapters("acme")))
            if comes_back == "restored":
                await node.adapters.restore(ACME, "r", "sql")
            else:
                await node.publish("sql", "two")
            admitted.append(await node.admit(ACME, "sql"))
            is_undone.set()
            assert not (await deletion).drained
            node.revocation.check()
            assert [each.running.ended_with for each in admitted] == [None, None]

    run(scenario)


def test_a_deletion_that_an_engine_does_not_acknowledge_is_not_drained(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.control.requests.draining.ACK_WAIT_S", 0.02)

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            await node.residency.load(digest)
            node.engine.may_unload.clear()
            assert not (await node.adapters.delete(ACME, "r", "sql", drain_s=0)).drained
            node.engine.may_unload.set()
            await eventually(lambda: node.engine.unloads == [digest])

    run(scenario)


def test_a_deleted_adapter_can_be_restored_for_a_day_and_its_name_reused_after_that(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            await node.publish("sql", "two")
            await node.adapters.delete(ACME, "r", "sql", drain_s=0)
            with pytest.raises(ServingError) as refused:
                await node.adapters.delete(ACME, "r", "sql", drain_s=0)
            assert refused.value.code is ErrorCode.ADAPTER_NOT_FOUND
            restored = await node.adapters.restore(ACME, "r", "sql")
            assert (restored.doc.aliases["live"].version, restored.deleted) == (2, False)
            await node.adapters.delete(ACME, "r", "sql", drain_s=0)
            node.clock.now += 86_400
            with pytest.raises(ServingError) as refused:
                await node.adapters.restore(ACME, "r", "sql")
            assert refused.value.code is ErrorCode.CONFLICT
            fresh = await node.versions.publish(ACME, "r", "sql", content("d" * 64))
            assert fresh.version.n == 3
            assert [version.n for version in (await node.versions.list(ACME, "sql"))[1]] == [3]

    run(scenario)


def test_a_pin_keeps_an_adapter_loaded_until_it_expires(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, max_loaded=2) as node:
            await with_tenants(node)
            pinned = await node.publish("pinned", "p")
            others = [await node.publish(f"other{number}", str(number)) for number in range(3)]
            await node.adapters.pin(ACME, "r", "pinned", Tier.DEVICE, ttl_s=60)
            await node.pins.keep()
            # The fake engine has nothing in its arena, so a token is generated to bring it there.
            assert [request.adapter_digest for request in node.engine.requests] == [pinned]
            for digest in others:
                node.clock.now += 1
                await node.residency.load(digest)
            await eventually(lambda: set(node.engine.known) == {pinned, others[2]})
            node.clock.now += 61
            await node.pins.keep()
            await node.residency.load(others[0])
            await node.residency.load(others[1])
            await eventually(lambda: pinned not in node.engine.known)
            await node.adapters.pin(ACME, "r", "pinned", Tier.DEVICE, ttl_s=None)
            node.clock.now += 1000 * 86_400
            await node.pins.keep()
            await node.residency.load(others[0])
            await node.residency.load(others[1])
            await eventually(lambda: set(node.engine.known) == {pinned, others[1]})
            with pytest.raises(ServingError):
                await node.adapters.pin(ACME, "r", "pinned", Tier.DISK, ttl_s=60)
            with pytest.raises(ServingError):
                await node.adapters.pin(ACME, "r", "pinned", Tier.HOST, ttl_s=0)

    run(scenario)

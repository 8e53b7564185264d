import asyncio
from pathlib import Path

import pytest

from loraserve.control.adapters.service import AdapterPatch
from loraserve.control.documents import adapter_edits
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.blobs import SWEPT_WITHIN_S
from loraserve.store.records import DocumentKind, Limits, Role
from loraserve.store.upload_session import KeptContent, UploadFile, UploadSession, UploadState
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, Node, content, eventually, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]

GLOBEX = server_principal("globex", "cli")
NOBODY = "$-1\r\n"


async def publish(node: Node, name: str, digest: str, principal: Principal = ACME) -> ErrorCode | None:
    """Publish a version of 100 bytes. Returns the code of the error, None = published."""
    try:
        await node.versions.publish(principal, "r", name, content(digest * 64))
    except ServingError as error:
        return error.code
    return None


def lease_of(valkey: Valkey) -> str:
    return valkey.command("GET", "{ls}:l:p:acme")


def test_publishing_on_two_servers_at_once_never_exceeds_the_byte_quota(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        # Neither follows the other's commits.
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(max_adapter_bytes=399)))
            await two.catalog.catch_up()
            ended = await asyncio.gather(
                *(publish(node, f"a{n}", n) for node, names in ((one, "0123"), (two, "4567")) for n in names)
            )
            assert sorted(map(str, ended)) == ["None"] * 3 + [str(ErrorCode.INSUFFICIENT_QUOTA)] * 5
            await one.catalog.catch_up()
            assert one.tenants.holdings("acme").adapter_bytes == 300
            # A deleted adapter cannot be restored into room that a publish has taken since.
            name = one.catalog.adapters("acme")[0].doc.name
            await one.adapters.delete(ACME, "r", name, drain_s=0)
            await two.catalog.catch_up()
            outcomes = await asyncio.gather(
                one.adapters.restore(ACME, "r", name), publish(two, "other", "8"), return_exceptions=True
            )
            await one.catalog.catch_up()
            assert one.tenants.holdings("acme").adapter_bytes == 300, outcomes
            assert lease_of(valkey) == NOBODY

    run(scenario)


@pytest.mark.parametrize("principal", [ACME, Principal("k", Role.ADMIN, "acme", "acme")])
def test_a_server_that_has_not_heard_of_a_limit_enforces_it(
    valkey: Valkey, tmp_path: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, deaf):
            await deaf.catalog.catch_up()
            assert await publish(one, "first", "a") is None
            await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(max_adapters=1)))
            assert await publish(deaf, "second", "b", principal) is ErrorCode.INSUFFICIENT_QUOTA
            # So does an upload when it is opened.
            await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(max_adapter_bytes=100)))
            await deaf.versions.check_may_publish(principal, "second")
            with pytest.raises(ServingError, match="its limit is 100"):
                deaf.quota.check("acme", "second", 100)
            await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(max_adapters=2)))
            assert await publish(deaf, "second", "b", principal) is None

    run(scenario)


def test_a_turn_looks_only_for_adapters_and_only_for_a_tenant_with_limits(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            scanned: list[DocumentKind] = []
            scan = node.documents.scan_changed
            monkeypatch.setattr(
                node.documents,
                "scan_changed",
                lambda kind, *args, **how: scanned.append(kind) or scan(kind, *args, **how),
            )
            assert await publish(node, "sql", "a") is None
            assert scanned == []
            await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(max_adapters=9)))
            assert await publish(node, "sql", "b") is None
            assert scanned == [DocumentKind.ADAPTER]

    run(scenario)


def test_publishing_waits_for_another_server_only_for_the_same_tenant(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            leases = node.live.publish_leases
            assert await leases.try_take("acme", "other server")
            publishing = asyncio.create_task(publish(node, "sql", "a"))
            for digest in "bcd":
                assert await publish(node, "sql", digest, GLOBEX) is None
            assert not publishing.done()
            assert await leases.release("acme", "other server")
            assert await publishing is None
            assert await leases.try_take("acme", "other server")
            # A change that uses no quota does not wait.
            await node.adapters.patch(ACME, "r", "sql", AdapterPatch(description="SQL"))

    run(scenario)


def test_publishing_is_refused_as_unavailable_after_a_long_wait_or_without_redis(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.control.tenancy.quota.WAIT_S", 0.05)

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            assert await node.live.publish_leases.try_take("acme", "other server")
            assert await publish(node, "sql", "a") is ErrorCode.SERVICE_UNAVAILABLE
            monkeypatch.setattr("loraserve.control.tenancy.quota.WAIT_S", 20.0)
            publishing = asyncio.create_task(publish(node, "sql", "a"))
            await asyncio.sleep(0.02)
            valkey.kill()
            assert await publishing is ErrorCode.SERVICE_UNAVAILABLE
            assert node.catalog.adapters("acme") == []

    run(scenario)


def test_a_cancelled_publish_still_finishes_and_releases_its_lease(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            publishing = asyncio.create_task(publish(node, "sql", "a"))
            await eventually(lambda: lease_of(valkey) != NOBODY or publishing.done())
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            await eventually(lambda: node.catalog.adapter("acme", "sql") is not None)
            assert await publish(node, "sql", "b") is None
            await eventually(lambda: lease_of(valkey) == NOBODY)

    run(scenario)


def left(digest: str, size_bytes: int, at: float) -> UploadSession:
    """An upload that was rejected after its content was written to disk."""
    return UploadSession(
        id="f" * 32,
        tenant="acme",
        name="sql",
        actor="cli",
        state=UploadState.REJECTED,
        files=[UploadFile(name="adapter_model.safetensors", size_bytes=size_bytes)],
        created_at=at,
        updated_at=at,
        expires_at=at,
        kept=KeptContent(digest=digest * 64, at=at),
    )


def test_content_that_uploads_left_on_disk_counts_once_until_it_is_swept(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(max_adapter_bytes=250)))
            assert await publish(node, "sql", "a") is None
            # "a" already belongs to a version.
            uploads = [left(digest, 100, node.clock.now) for digest in "abb"]
            assert node.quota.room_bytes("acme", unpublished=uploads) == 50
            node.quota.check("acme", "sql", 50, unpublished=uploads)
            with pytest.raises(
                ServingError, match="100 bytes belong to deleted versions, or to uploads that"
            ) as refused:
                node.quota.check("acme", "sql", 51, unpublished=uploads)
            assert refused.value.code is ErrorCode.INSUFFICIENT_QUOTA
            with pytest.raises(ServingError):
                await node.versions.publish(ACME, "r", "other", content("c" * 64), unpublished=uploads)
            # Publishing one of these contents takes no additional room.
            await node.versions.publish(ACME, "r", "other", content("b" * 64), unpublished=uploads)
            assert node.quota.room_bytes("acme", unpublished=uploads) == 50
            uploads = [left("d", 100, node.clock.now)]
            assert node.quota.room_bytes("acme", unpublished=uploads) == 0
            node.clock.now += SWEPT_WITHIN_S
            assert node.quota.room_bytes("acme", unpublished=uploads) == 50

    run(scenario)


def test_the_version_limit_of_an_adapter_counts_deleted_versions_while_they_are_on_disk(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_edits, "MAX_VERSIONS", 3)

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            for digest in "abc":
                assert await publish(node, "sql", digest) is None
            with pytest.raises(
                ServingError, match=r"'sql' has 3 versions; at most 3 are allowed.*--keep-versions"
            ) as full:
                await node.versions.publish(ACME, "r", "sql", content("d" * 64))
            assert full.value.code is ErrorCode.INSUFFICIENT_QUOTA
            with pytest.raises(ServingError):
                node.quota.check("acme", "sql", 1)  # Before an upload sends anything.
            # Neither content that it has already nor a version of another adapter counts as one more.
            assert await publish(node, "sql", "a") is None
            assert await publish(node, "other", "d") is None
            await node.versions.delete(ACME, "r", "sql", 2)
            with pytest.raises(ServingError, match="has 3 versions, 1 of them deleted within the last 70 minutes"):
                await node.versions.publish(ACME, "r", "sql", content("d" * 64))
            node.clock.now += SWEPT_WITHIN_S
            assert await publish(node, "sql", "d") is None
            assert await publish(node, "sql", "e") is ErrorCode.INSUFFICIENT_QUOTA

    run(scenario)


def test_a_server_with_keep_versions_publishes_even_if_an_adapter_exceeds_the_version_limit(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            for digest in "abcdef":
                assert await publish(node, "sql", digest) is None
            node.clock.now += SWEPT_WITHIN_S
        monkeypatch.setattr(adapter_edits, "MAX_VERSIONS", 5)
        async with running_node(tmp_path / "data", valkey.url, follow=False, keep_versions=2) as again:
            again.clock.now = node.clock.now
            for digest in "012345":
                assert await publish(again, "sql", digest) is None
                again.clock.now += SWEPT_WITHIN_S / 2

    run(scenario)

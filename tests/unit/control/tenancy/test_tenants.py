from pathlib import Path

import pytest

from loraserve.control.tenancy.principal import Principal
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.blobs import SWEPT_WITHIN_S
from loraserve.store.records import Limits, Role, Status
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, content, run, running_node, with_tenants

__all__ = ["valkey"]

ACME_ADMIN = Principal("k", Role.ADMIN, "acme", "acme")


def test_the_default_and_shared_tenants_are_created_only_once(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await node.tenants.ensure_builtin()
            await node.tenants.ensure_builtin()
            assert [(found.id, found.rev) for found in node.tenants.list(ADMIN).items] == [
                ("default", 1),
                ("shared", 1),
            ]
            salts = {found.doc.kv_salt for found in node.catalog.all_tenants()}
            assert len(salts) == 2

    run(scenario)


def test_only_admins_of_all_tenants_create_and_change_tenants(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            for call in (
                node.tenants.create(ACME_ADMIN, "r", "mine"),
                node.tenants.patch(ACME_ADMIN, "r", "acme", TenantPatch(limits=Limits())),
            ):
                with pytest.raises(ServingError) as refused:
                    await call
                assert refused.value.code is ErrorCode.FORBIDDEN
            assert [found.id for found in node.tenants.list(ACME_ADMIN).items] == ["acme"]
            messages: set[str] = set()
            for tenant in ("globex", "missing"):
                with pytest.raises(ServingError) as refused:
                    await node.tenants.read(ACME_ADMIN, tenant)
                assert refused.value.code is ErrorCode.NOT_FOUND
                messages.add(refused.value.message.replace(tenant, "<id>"))
            assert len(messages) == 1

    run(scenario)


def test_tenant_ids_that_are_taken_or_invalid_are_refused(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            for tenant, code in (
                ("acme", ErrorCode.CONFLICT),
                ("*", ErrorCode.INVALID_VALUE),
                ("a/b", ErrorCode.INVALID_VALUE),
            ):
                with pytest.raises(ServingError) as refused:
                    await node.tenants.create(ADMIN, "r", tenant)
                assert (refused.value.code, refused.value.param) == (code, "id")

    run(scenario)


@pytest.mark.parametrize(
    ("patch", "param"),
    [
        (TenantPatch(weight=0.0), "weight"),
        (TenantPatch(weight=float("nan")), "weight"),
        (TenantPatch(description="x" * 2001), "description"),
        (TenantPatch(status=Status.REVOKED), "status"),
        (TenantPatch(limits=Limits(max_adapter_bytes=2**54)), "limits.max_adapter_bytes"),
    ],
)
def test_tenant_values_out_of_range_are_refused_with_the_name_of_the_field(
    valkey: Valkey, tmp_path: Path, patch: TenantPatch, param: str
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            with pytest.raises(ServingError) as refused:
                await node.tenants.patch(ADMIN, "r", "acme", patch)
            assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_VALUE, param)

    run(scenario)


def test_holdings_count_versions_still_on_disk_and_keys_not_revoked(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.versions.publish(ACME, "r", "a", content("a" * 64, size_bytes=5))
            await node.versions.publish(ACME, "r", "a", content("b" * 64, size_bytes=7))
            await node.versions.publish(ACME, "r", "b", content("a" * 64, size_bytes=5))
            await node.versions.delete(ACME, "r", "a", 1)
            revoked = await node.keys.create(ACME, "r", role=Role.INFER)
            await node.keys.create(ACME, "r", role=Role.INFER)
            await node.keys.revoke(ACME, "r", revoked.document.id)
            holdings = node.tenants.holdings("acme")
            assert (holdings.num_adapters, holdings.adapter_bytes, holdings.num_keys) == (2, 17, 1)
            node.clock.now += SWEPT_WITHIN_S
            assert node.tenants.holdings("acme").adapter_bytes == 12

    run(scenario)

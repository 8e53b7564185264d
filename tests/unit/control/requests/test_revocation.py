from pathlib import Path

import pytest

from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT, Role, Status
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, eventually, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]


@pytest.mark.parametrize("change", ["revoked", "suspended", "expired", "rotated", "tenant suspended"])
def test_running_requests_end_on_every_server_unless_the_key_was_only_rotated(
    valkey: Valkey, tmp_path: Path, change: str
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            issued = await one.keys.create(ACME, "r", role=Role.INFER, expires_at=one.clock.now + 100)
            bystander = await one.keys.create(ADMIN, "r", role=Role.INFER, tenant="globex")
            ended: list[ServingError] = []
            for node in (one, two):
                admitted = await node.admit(await node.authenticator.authenticate(issued.text))
                admitted.running.on_abort(ended.append)
                other = await node.admit(await node.authenticator.authenticate(bystander.text))
                other.running.on_abort(lambda error: pytest.fail(f"a bystander was ended: {error}"))
            key_id = issued.document.id
            match change:
                case "revoked":
                    await one.keys.revoke(ACME, "r", key_id)
                case "suspended":
                    await one.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.SUSPENDED))
                case "expired":
                    one.clock.now += 100
                    two.clock.now += 100
                case "rotated":
                    await one.keys.rotate(ACME, "r", key_id, grace_s=50)
                    one.clock.now += 51
                    two.clock.now += 51
                case _:
                    await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(status=Status.SUSPENDED))
            if change == "rotated":
                # They were admitted with the newest secret of that time, and the key itself is still valid.
                one.revocation.check()
                two.revocation.check()
                assert ended == []
                return
            await eventually(lambda: len(ended) == 2)
            expected = ErrorCode.TENANT_SUSPENDED if change == "tenant suspended" else ErrorCode.INVALID_API_KEY
            assert {error.code for error in ended} == {expected}

    run(scenario)


def test_a_request_started_with_the_old_secret_ends_with_its_grace_time(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            await node.keys.rotate(ACME, "r", issued.document.id, grace_s=50)
            admitted = await node.admit(await node.authenticator.authenticate(issued.text))
            node.revocation.check()
            assert admitted.running.ended_with is None
            node.clock.now += 51
            node.revocation.check()
            assert admitted.running.ended_with is not None

    run(scenario)


def test_suspending_a_tenant_ends_requests_of_an_operator_of_all_tenants_acting_for_it(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ADMIN, "r", role=Role.OPERATOR, tenant=ANY_TENANT)
            admitted = await node.admit(await node.authenticator.authenticate(issued.text, "acme"))
            await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(status=Status.SUSPENDED))
            await eventually(lambda: admitted.running.ended_with is not None)
            late: list[ServingError] = []
            admitted.running.on_abort(late.append)
            assert late == [admitted.running.ended_with]

    run(scenario)

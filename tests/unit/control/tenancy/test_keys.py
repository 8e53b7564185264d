from pathlib import Path

import pytest

from loraserve.control.tenancy import keys
from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.offline_keys import create_key_offline, revoke_key_offline
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.documents import DocumentStore
from loraserve.store.records import ANY_TENANT, Limits, Role, Status
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, run, running_node, with_tenants

__all__ = ["valkey"]

ACME_ADMIN = Principal("k", Role.ADMIN, "acme", "acme")
GLOBEX_ADMIN = Principal("k", Role.ADMIN, "globex", "globex")


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.INFER, {Action.INFER}),
        (Role.VIEWER, {Action.READ}),
        (Role.OPERATOR, {Action.INFER, Action.READ, Action.OPERATE}),
        (Role.ADMIN, {Action.INFER, Action.READ, Action.OPERATE, Action.ADMINISTER}),
    ],
)
def test_a_role_allows_exactly_its_actions(role: Role, allowed: set[Action]) -> None:
    of_one = Principal("k", role, "acme", "acme")
    of_all = Principal("k", role, ANY_TENANT, "acme")
    assert {action for action in Action if of_one.can(action)} == allowed
    everything = {Action.ADMINISTER_ALL} if role is Role.ADMIN else set()
    assert {action for action in Action if of_all.can(action)} == allowed | everything


def test_an_admin_sees_and_changes_keys_of_its_own_tenant_only(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            own = await node.keys.create(ACME_ADMIN, "r", role=Role.INFER)
            everyone = await node.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            assert [found.id for found in node.keys.list(ACME_ADMIN).items] == [own.document.id]
            assert {found.id for found in node.keys.list(ADMIN).items} == {own.document.id, everyone.document.id}
            for tenant, of_tenant in (("acme", [own.document.id]), ("*", [everyone.document.id]), ("globex", [])):
                assert [found.id for found in node.keys.list(ADMIN, tenant=tenant).items] == of_tenant
            assert node.keys.list(ACME_ADMIN, tenant="*").items == []
            bodies: set[str] = set()
            for principal, key_id in ((GLOBEX_ADMIN, own.document.id), (ACME_ADMIN, everyone.document.id)):
                for call in (
                    node.keys.patch(principal, "r", key_id, KeyPatch(name="x"), expected_rev=7),
                    node.keys.revoke(principal, "r", key_id),
                    node.keys.rotate(principal, "r", key_id, grace_s=0),
                ):
                    with pytest.raises(ServingError) as refused:
                        await call
                    assert refused.value.code is ErrorCode.NOT_FOUND
                    bodies.add(refused.value.message.replace(key_id, "<id>"))
            with pytest.raises(ServingError) as refused:
                await node.keys.read(ACME_ADMIN, "aaaaaaaa")
            bodies.add(refused.value.message.replace("aaaaaaaa", "<id>"))
            assert len(bodies) == 1

    run(scenario)


def test_a_key_cannot_create_a_key_with_more_rights_than_its_own(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            listed = Principal("k", Role.ADMIN, "acme", "acme", adapters=frozenset({"sql"}))
            refused_calls = [
                node.keys.create(Principal("k", Role.OPERATOR, "acme", "acme"), "r", role=Role.INFER),
                node.keys.create(ACME_ADMIN, "r", role=Role.INFER, tenant="globex"),
                node.keys.create(ACME_ADMIN, "r", role=Role.INFER, tenant=ANY_TENANT),
                node.keys.create(listed, "r", role=Role.INFER),
                node.keys.create(listed, "r", role=Role.INFER, adapters=["sql", "other"]),
            ]
            for call in refused_calls:
                with pytest.raises(ServingError) as refused:
                    await call
                assert refused.value.code is ErrorCode.FORBIDDEN
            await node.keys.create(listed, "r", role=Role.INFER, adapters=["sql"])

    run(scenario)


def test_a_key_cannot_change_or_revoke_a_key_with_more_rights_than_its_own(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            own = await node.keys.create(ACME, "r", role=Role.ADMIN, adapters=["sql"])
            listed = await node.authenticator.authenticate(own.text)
            for adapters in (None, ["sql", "other"]):
                wider = (await node.keys.create(ACME, "r", role=Role.ADMIN, adapters=adapters)).document
                for call in (
                    node.keys.patch(listed, "r", wider.id, KeyPatch(role=Role.INFER, adapters=["sql"])),
                    node.keys.patch(listed, "r", wider.id, KeyPatch(status=Status.SUSPENDED)),
                    node.keys.rotate(listed, "r", wider.id, grace_s=0),
                    node.keys.revoke(listed, "r", wider.id),
                ):
                    with pytest.raises(ServingError) as refused:
                        await call
                    assert refused.value.code is ErrorCode.FORBIDDEN
                assert (await node.keys.read(ACME, wider.id)).rev == wider.rev
            as_wide = await node.keys.create(ACME, "r", role=Role.ADMIN, adapters=["sql"])
            await node.keys.patch(listed, "r", as_wide.document.id, KeyPatch(name="the other"))
            assert (await node.keys.revoke(listed, "r", as_wide.document.id)).doc.status is Status.REVOKED
            # A key can always revoke itself, even if it was given more rights after it was authenticated.
            await node.keys.patch(ACME, "r", own.document.id, KeyPatch(adapters=None))
            assert (await node.keys.revoke(listed, "r", own.document.id)).doc.status is Status.REVOKED

    run(scenario)


def test_revoked_and_expired_keys_do_not_count_toward_the_key_limit_of_a_tenant(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MAX_KEYS", 3)

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            made = [await node.keys.create(ACME_ADMIN, "r", role=Role.INFER) for _ in range(2)]
            await node.keys.create(ACME_ADMIN, "r", role=Role.INFER, expires_at=node.clock.now + 60)
            with pytest.raises(
                ServingError, match=r"3 keys of the tenant 'acme' .* at most 3 are allowed\."
            ) as refused:
                await node.keys.create(ADMIN, "r", role=Role.INFER, tenant="acme")
            assert refused.value.code is ErrorCode.INSUFFICIENT_QUOTA
            await node.keys.create(ADMIN, "r", role=Role.INFER, tenant=ANY_TENANT)
            await node.keys.create(GLOBEX_ADMIN, "r", role=Role.INFER)
            # A suspended key counts, because it may be reactivated.
            await node.keys.patch(ACME_ADMIN, "r", made[0].document.id, KeyPatch(status=Status.SUSPENDED))
            with pytest.raises(ServingError):
                await node.keys.create(ACME_ADMIN, "r", role=Role.INFER)
            await node.keys.revoke(ACME_ADMIN, "r", made[0].document.id)
            await node.keys.create(ACME_ADMIN, "r", role=Role.INFER)
            node.clock.now += 60
            last = await node.keys.create(ACME_ADMIN, "r", role=Role.INFER)
            # Extending an expired key counts as one more.
            (expired,) = [key for key in node.catalog.held_keys("acme") if key.doc.expires_at is not None]
            with pytest.raises(ServingError) as refused:
                await node.keys.patch(ACME_ADMIN, "r", expired.id, KeyPatch(expires_at=None))
            assert refused.value.code is ErrorCode.INSUFFICIENT_QUOTA
            await node.keys.patch(ACME_ADMIN, "r", expired.id, KeyPatch(name="expired"))
            await node.keys.patch(ACME_ADMIN, "r", last.document.id, KeyPatch(expires_at=node.clock.now + 60))
            await node.keys.revoke(ACME_ADMIN, "r", last.document.id)
            await node.keys.patch(ACME_ADMIN, "r", expired.id, KeyPatch(expires_at=None))

    run(scenario)


def test_revoking_is_final_and_can_be_repeated(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            key_id = issued.document.id
            revoked = await node.keys.revoke(ACME, "r", key_id)
            assert revoked.doc.status is Status.REVOKED
            assert (await node.keys.revoke(ACME, "r", key_id)).rev == revoked.rev
            for call in (
                node.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.ACTIVE)),
                node.keys.rotate(ACME, "r", key_id, grace_s=0),
            ):
                with pytest.raises(ServingError) as refused:
                    await call
                assert refused.value.code is ErrorCode.CONFLICT

    run(scenario)


@pytest.mark.parametrize(
    ("patch", "param"),
    [
        (KeyPatch(name="x" * 201), "name"),
        (KeyPatch(adapters=["../etc"]), "adapters"),
        (KeyPatch(limits=Limits(requests_per_min=-1)), "limits.requests_per_min"),
        (KeyPatch(limits=Limits(max_adapters=1)), "limits.max_adapters"),
        (KeyPatch(expires_at=5.0), "expires_at"),
        (KeyPatch(expires_at=1e18), "expires_at"),
        (KeyPatch(status=Status.REVOKED), "status"),
    ],
)
def test_key_values_out_of_range_are_refused_with_the_name_of_the_field(
    valkey: Valkey, tmp_path: Path, patch: KeyPatch, param: str
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            with pytest.raises(ServingError) as refused:
                await node.keys.patch(ACME, "r", issued.document.id, patch)
            assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_VALUE, param)

    run(scenario)


def test_the_first_admin_key_needs_neither_server_nor_redis(tmp_path: Path, valkey: Valkey) -> None:
    data_dir = tmp_path / "data"
    store = DocumentStore(data_dir)
    issued = create_key_offline(store, role=Role.ADMIN, tenant=ANY_TENANT, name="first")
    with pytest.raises(ServingError) as refused:
        create_key_offline(store, role=Role.ADMIN, tenant="nobody")
    assert refused.value.code is ErrorCode.NOT_FOUND

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url) as node:
            await with_tenants(node)
            assert node.authenticator.has_admin
            principal = await node.authenticator.authenticate(issued.text)
            assert principal.can(Action.ADMINISTER_ALL)
            await node.admit(principal)
            revoke_key_offline(node.documents, issued.document.id)
            await node.catalog.catch_up()
            with pytest.raises(ServingError):
                await node.authenticator.authenticate(issued.text)

    run(scenario)

import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from loraserve.control.tenancy.api_keys import generate_key, hash_key, is_key, try_parse_id
from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.offline_keys import create_key_offline, revoke_key_offline
from loraserve.control.tenancy.principal import Principal
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.documents import DocumentStore
from loraserve.store.records import ANY_TENANT, DocumentKind, Role, Status
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, Node, eventually, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]

T = TypeVar("T")


def test_a_key_contains_its_id_and_is_stored_as_a_hash() -> None:
    key = generate_key()
    assert key.text.startswith(f"ls-{key.id}_")
    assert try_parse_id(key.text) == key.id
    assert key.sha256 == hash_key(key.text)
    assert is_key(key.text, key.sha256)
    assert not is_key(f"{key.text}x", key.sha256)
    assert generate_key(key.id).sha256 != key.sha256


@pytest.mark.parametrize(
    "text", ["", "ls-", "sk-abcdefgh_" + "x" * 43, "ls-ABCDEFGH_" + "x" * 43, "ls-abcdefgh_x", "\ud800"]
)
def test_malformed_keys_have_no_id(text: str) -> None:
    assert try_parse_id(text) is None


async def refusal(node: Node, text: str | None, acting_tenant: str | None = None) -> ErrorCode:
    with pytest.raises(ServingError) as refused:
        await node.authenticator.authenticate(text, acting_tenant)
    return refused.value.code


def test_every_caller_is_admin_if_there_are_no_keys(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            assert node.authenticator.is_open
            assert not node.authenticator.has_admin
            principal = await node.authenticator.authenticate("whatever a client sends")
            assert (principal.role, principal.acting_tenant, principal.actor) == (Role.ADMIN, "default", "open")
            assert (await node.authenticator.authenticate(None, "acme")).acting_tenant == "acme"
            assert await refusal(node, None, "nobody") is ErrorCode.NOT_FOUND
            await node.keys.create(principal, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            assert not node.authenticator.is_open
            assert node.authenticator.has_admin
            assert await refusal(node, None) is ErrorCode.INVALID_API_KEY

    run(scenario)


def test_callers_of_a_formerly_open_server_are_refused_once_it_is_closed(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            anyone = await node.authenticator.authenticate(None)
            running = await node.admit(anyone)
            assert await node.authenticator.confirm(anyone) == anyone
            await node.keys.create(anyone, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            for judge in (node.authenticator.confirm, published(node)):
                with pytest.raises(ServingError) as refused:
                    await judge(anyone)
                assert refused.value.code is ErrorCode.INVALID_API_KEY
            node.revocation.check()
            assert running.running.ended_with is not None

    run(scenario)


def test_a_server_whose_last_key_was_revoked_stays_closed(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            await node.keys.revoke(ADMIN, "r", issued.document.id)
            assert not node.authenticator.is_open
            assert not node.authenticator.has_admin
            assert await refusal(node, issued.text) is ErrorCode.INVALID_API_KEY

    run(scenario)


def key_files(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "docs" / "key").glob("*/*/*.json"))


def of_a_newer_release(content: bytes) -> bytes:
    return content.replace(b'"doc":{', b'"doc":{"field_of_tomorrow":1,')


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "torn": lambda content: content[:-20],
    "of a newer release": of_a_newer_release,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_server_whose_keys_are_unreadable_is_closed_and_logs_which(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    data_dir = tmp_path / "data"
    documents = DocumentStore(data_dir)
    issued = create_key_offline(documents, role=Role.ADMIN, tenant=ANY_TENANT)
    (path,) = key_files(data_dir)
    path.write_bytes(damage(path.read_bytes()))

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url) as node:
            await with_tenants(node)
            assert not node.authenticator.is_open
            assert not node.authenticator.has_admin
            for text in (None, "whatever a client sends", issued.text):
                assert await refusal(node, text) is ErrorCode.INVALID_API_KEY
            assert str(path) in caplog.text
            assert "none of their documents can be read" in caplog.text
            # The remedy that the message names.
            other = create_key_offline(documents, role=Role.ADMIN, tenant=ANY_TENANT)
            assert (await node.authenticator.authenticate(other.text)).role is Role.ADMIN

    run(scenario)


def test_an_older_revision_of_a_damaged_key_is_not_used(valkey: Valkey, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    documents = DocumentStore(data_dir)
    issued = create_key_offline(documents, role=Role.ADMIN, tenant=ANY_TENANT)
    revoke_key_offline(documents, issued.document.id)
    key_files(data_dir)[-1].write_bytes(b"torn")

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url) as node:
            assert not node.authenticator.is_open
            assert await refusal(node, issued.text) is ErrorCode.INVALID_API_KEY

    run(scenario)


def test_a_key_that_was_briefly_unreadable_works_later(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / "data"
    issued = create_key_offline(DocumentStore(data_dir), role=Role.ADMIN, tenant=ANY_TENANT)
    os.utime(key_files(data_dir)[0].parent, (1e9, 1e9))

    def fail(path: str) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", path)

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url, follow=False) as node:
            assert not node.authenticator.is_open
            assert await refusal(node, issued.text) is ErrorCode.INVALID_API_KEY
            monkeypatch.undo()
            await node.catalog.catch_up()
            assert (await node.authenticator.authenticate(issued.text)).role is Role.ADMIN

    monkeypatch.setattr("loraserve.store.documents._content", fail)
    run(scenario)


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["all keys", "prefix", "key"])
def test_a_server_starts_but_refuses_keys_in_folders_that_it_may_not_read(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    data_dir = tmp_path / "data"
    issued = create_key_offline(DocumentStore(data_dir), role=Role.ADMIN, tenant=ANY_TENANT)
    folder = str(key_files(data_dir)[0].parents[2 - depth])

    def refusing(system_call: Callable[[str], T]) -> Callable[[str], T]:
        def listed(path: str) -> T:
            if f"{path}/".startswith(f"{folder}/"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return system_call(path)

        return listed

    async def scenario() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os, "scandir", refusing(os.scandir))
            patched.setattr(os, "listdir", refusing(os.listdir))
            async with running_node(data_dir, valkey.url, follow=False) as node:
                assert f"{folder}: cannot be read: [Errno 13] Permission denied" in caplog.text
                assert not node.authenticator.is_open
                assert await refusal(node, issued.text) is ErrorCode.INVALID_API_KEY
                patched.undo()
                await node.catalog.catch_up()
                assert (await node.authenticator.authenticate(issued.text)).role is Role.ADMIN

    run(scenario)


def test_an_unreadable_key_closes_an_open_server(valkey: Valkey, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url, follow=False) as node:
            assert node.authenticator.is_open
            create_key_offline(DocumentStore(data_dir), role=Role.ADMIN, tenant=ANY_TENANT)
            key_files(data_dir)[0].write_bytes(b"torn")
            await node.catalog.catch_up()
            assert not node.authenticator.is_open
            shutil.rmtree(data_dir / "docs" / "key")
            (data_dir / "docs" / "key").mkdir()
            await node.catalog.catch_up()
            assert not node.authenticator.is_open, "it never opens again"

    run(scenario)


def test_a_closed_server_stays_closed_if_its_keys_become_unreadable(valkey: Valkey, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    create_key_offline(DocumentStore(data_dir), role=Role.ADMIN, tenant=ANY_TENANT)

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url, follow=False) as node:
            (path,) = key_files(data_dir)
            path.write_bytes(b"torn")
            os.utime(path.parent, ns=(1, 1))
            await node.catalog.catch_up()
            valkey.restart()
            await node.catalog.catch_up()
            assert not node.authenticator.is_open

    run(scenario)


def test_keys_known_only_to_redis_close_a_server(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its data directory was lost, or is not that of the other servers on this Redis."""

    async def scenario() -> None:
        async with running_node(tmp_path / "new", valkey.url) as running:
            assert running.authenticator.is_open
            async with running_node(tmp_path / "first", valkey.url) as node:
                await with_tenants(node)
                issued = await node.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            await eventually(lambda: not running.authenticator.is_open)
            assert await refusal(running, None) is ErrorCode.INVALID_API_KEY
        async with running_node(tmp_path / "other", valkey.url) as started:
            assert await refusal(started, issued.text) is ErrorCode.INVALID_API_KEY

    run(scenario)
    assert "which the data directory does not have" in caplog.text


def test_a_key_acts_only_for_its_tenant_unless_it_is_a_key_for_all_tenants(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            own = await node.keys.create(ACME, "r", role=Role.ADMIN)
            everyone = await node.keys.create(ADMIN, "r", role=Role.OPERATOR, tenant=ANY_TENANT)
            assert (await node.authenticator.authenticate(own.text)).acting_tenant == "acme"
            assert (await node.authenticator.authenticate(own.text, "acme")).acting_tenant == "acme"
            # The refusal does not reveal whether the tenant exists.
            assert await refusal(node, own.text, "globex") is ErrorCode.FORBIDDEN
            assert await refusal(node, own.text, "nobody") is ErrorCode.FORBIDDEN
            assert (await node.authenticator.authenticate(everyone.text)).acting_tenant == "default"
            assert (await node.authenticator.authenticate(everyone.text, "globex")).acting_tenant == "globex"
            assert (await node.authenticator.of_key(own.document.id)).acting_tenant == "acme"

    run(scenario)


def test_wrong_secrets_unknown_ids_and_malformed_keys_get_the_same_answer(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            messages: set[str] = set()
            for text in (generate_key(issued.document.id).text, generate_key().text, "n\ud800", issued.text[:-1]):
                with pytest.raises(ServingError) as refused:
                    await node.authenticator.authenticate(text)
                assert refused.value.code is ErrorCode.INVALID_API_KEY
                messages.add(refused.value.message)
            assert len(messages) == 1

    run(scenario)


def test_a_rotated_secret_works_until_its_grace_time_ends(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            old = await node.keys.create(ACME, "r", role=Role.INFER)
            new = await node.keys.rotate(ACME, "r", old.document.id, grace_s=60)
            assert new.document.id == old.document.id
            principal = await node.authenticator.authenticate(old.text)
            assert principal.is_old_secret
            assert not (await node.authenticator.authenticate(new.text)).is_old_secret
            node.clock.now += 61
            assert await refusal(node, old.text) is ErrorCode.INVALID_API_KEY
            with pytest.raises(ServingError):
                node.authenticator.current(principal)
            await node.authenticator.authenticate(new.text)
            newest = await node.keys.rotate(ACME, "r", old.document.id, grace_s=0)
            assert await refusal(node, new.text) is ErrorCode.INVALID_API_KEY
            await node.authenticator.authenticate(newest.text)

    run(scenario)


def test_an_expired_old_secret_can_neither_manage_nor_start_requests(valkey: Valkey, tmp_path: Path) -> None:
    """Whether or not this server has heard of the rotation."""

    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, deaf):
            issued = await one.keys.create(ACME, "r", role=Role.ADMIN)
            await deaf.catalog.catch_up()
            principals = [(node, await node.authenticator.authenticate(issued.text)) for node in (one, deaf)]
            running = await one.admit(principals[0][1])
            rotated = await one.keys.rotate(ACME, "r", issued.document.id, grace_s=60)
            for node, principal in principals:
                assert (await node.authenticator.confirm(principal)).is_old_secret
            for node in (one, deaf):
                node.clock.now += 61
            for node, principal in principals:
                for judge in (admitted(node), node.authenticator.confirm, published(node)):
                    with pytest.raises(ServingError) as refused:
                        await judge(principal)
                    assert refused.value.code is ErrorCode.INVALID_API_KEY
            one.revocation.check()
            assert running.running.ended_with is None
            await one.authenticator.confirm(await one.authenticator.authenticate(rotated.text))

    run(scenario)


def test_expired_and_suspended_keys_are_refused_until_they_are_extended_or_reactivated(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            expires_at = node.clock.now + 10
            issued = await node.keys.create(ACME, "r", role=Role.INFER, expires_at=expires_at)
            key_id = issued.document.id
            await node.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.SUSPENDED))
            assert await refusal(node, issued.text) is ErrorCode.INVALID_API_KEY
            await node.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.ACTIVE))
            await node.authenticator.authenticate(issued.text)
            node.clock.now += 10
            assert await refusal(node, issued.text) is ErrorCode.INVALID_API_KEY
            await node.keys.patch(ACME, "r", key_id, KeyPatch(expires_at=None))
            await node.authenticator.authenticate(issued.text)

    run(scenario)


def test_a_suspended_tenant_is_refused_but_an_admin_of_all_tenants_can_reactivate_it(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            own = await node.keys.create(ACME, "r", role=Role.ADMIN)
            everyone = await node.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(status=Status.SUSPENDED))
            assert await refusal(node, own.text) is ErrorCode.TENANT_SUSPENDED
            principal = await node.authenticator.authenticate(everyone.text, "acme")
            with pytest.raises(ServingError) as refused:
                await node.admit(principal)
            assert refused.value.code is ErrorCode.TENANT_SUSPENDED
            await node.tenants.patch(principal, "r", "acme", TenantPatch(status=Status.ACTIVE))
            await node.authenticator.authenticate(own.text)

    run(scenario)


def test_a_key_created_or_rotated_on_another_server_works_here_at_once(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with (
            running_node(data_dir, valkey.url) as one,
            running_node(data_dir, valkey.url, follow=False, flag_keys=("k",)) as deaf,
        ):
            await with_tenants(one)
            issued = await one.keys.create(ACME, "r", role=Role.INFER)
            await deaf.catalog.catch_up()
            assert (await deaf.authenticator.authenticate(issued.text)).key_id == issued.document.id
            rotated = await one.keys.rotate(ACME, "r", issued.document.id, grace_s=0)
            await deaf.authenticator.authenticate(rotated.text)

    run(scenario)


def test_a_key_or_tenant_reactivated_on_another_server_works_here_at_once(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with (
            running_node(data_dir, valkey.url) as one,
            running_node(data_dir, valkey.url, follow=False, flag_keys=("k",)) as deaf,
        ):
            await with_tenants(one)
            issued = await one.keys.create(ACME, "r", role=Role.INFER)
            key_id = issued.document.id
            await one.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.SUSPENDED))
            await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(status=Status.SUSPENDED))
            await one.tenants.patch(ADMIN, "r", "default", TenantPatch(status=Status.SUSPENDED))
            await deaf.catalog.catch_up()
            for text, code in ((issued.text, ErrorCode.INVALID_API_KEY), ("k", ErrorCode.TENANT_SUSPENDED)):
                assert await refusal(deaf, text) is code
            await one.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.ACTIVE))
            assert await refusal(deaf, issued.text) is ErrorCode.TENANT_SUSPENDED
            await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(status=Status.ACTIVE))
            await one.tenants.patch(ADMIN, "r", "default", TenantPatch(status=Status.ACTIVE))
            assert (await deaf.authenticator.authenticate(issued.text)).key_id == key_id
            await deaf.authenticator.authenticate("k")
            await one.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.SUSPENDED))
            await deaf.catalog.catch_up()
            await one.keys.patch(ACME, "r", key_id, KeyPatch(status=Status.ACTIVE))
            assert (await deaf.authenticator.of_key(key_id)).key_id == key_id

    run(scenario)


@pytest.mark.parametrize("change", ["revoked", "suspended", "demoted", "tenant suspended"])
def test_a_server_that_has_not_heard_of_a_change_confirms_no_older_revision(
    valkey: Valkey, tmp_path: Path, change: str
) -> None:
    expected = {"revoked": ErrorCode.INVALID_API_KEY, "suspended": ErrorCode.INVALID_API_KEY}

    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, deaf):
            issued = await one.keys.create(ACME, "r", role=Role.ADMIN)
            await deaf.catalog.catch_up()
            before = await deaf.authenticator.authenticate(issued.text)
            assert await deaf.authenticator.confirm(before) == before
            match change:
                case "revoked":
                    await one.keys.revoke(ACME, "r", issued.document.id)
                case "suspended":
                    await one.keys.patch(ACME, "r", issued.document.id, KeyPatch(status=Status.SUSPENDED))
                case "demoted":
                    await one.keys.patch(ACME, "r", issued.document.id, KeyPatch(role=Role.VIEWER))
                    confirmed = await deaf.authenticator.confirm(before)
                    assert (confirmed.role, confirmed.key_rev) == (Role.VIEWER, 2)
                    return
                case _:
                    await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(status=Status.SUSPENDED))
            with pytest.raises(ServingError) as refused:
                await deaf.authenticator.confirm(before)
            assert refused.value.code is expected.get(change, ErrorCode.TENANT_SUSPENDED)

    run(scenario)


def test_a_server_whose_disk_lags_confirms_nothing_until_it_has_caught_up(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            issued = await one.keys.create(ACME, "r", role=Role.ADMIN)
            key_id = issued.document.id
            shutil.copytree(data_dir, copy)
            async with running_node(copy, valkey.url) as two:
                principal = await two.authenticator.authenticate(issued.text)
                running = await two.admit(principal)
                await one.keys.patch(ACME, "r", key_id, KeyPatch(name="renamed"))
                await eventually(lambda: two.catalog.is_behind((DocumentKind.KEY, key_id)))
                for judge in (two.authenticator.confirm, admitted(two), published(two)):
                    with pytest.raises(ServingError) as refused:
                        await judge(principal)
                    assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
                assert f"Redis knows revision 2 of key '{key_id}'" in caplog.text
                # Whether the running request may continue is unknown, so it does.
                two.revocation.check()
                assert running.running.ended_with is None
                valkey.kill()
                with pytest.raises(ServingError):
                    await two.authenticator.confirm(principal)
                shutil.copytree(data_dir / "docs", copy / "docs", dirs_exist_ok=True)
                assert (await two.authenticator.confirm(principal)).key_rev == 2

    run(scenario)


def admitted(node: Node) -> Callable[[Principal], Awaitable[object]]:
    return node.admit


def published(node: Node) -> Callable[[Principal], Awaitable[object]]:
    return lambda principal: node.versions.check_may_publish(principal, "sql")


def test_principals_that_redis_confirmed_before_an_outage_are_confirmed_during_it(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.ADMIN)
            principal = await node.authenticator.authenticate(issued.text)
            valkey.kill()
            assert await node.authenticator.confirm(principal) == principal
            # Changes on disk still take effect.
            revoke_key_offline(node.documents, issued.document.id)
            await node.catalog.catch_up()
            with pytest.raises(ServingError) as refused:
                await node.authenticator.confirm(principal)
            assert refused.value.code is ErrorCode.INVALID_API_KEY

    run(scenario)


@pytest.mark.parametrize("how", ["emptied", "older"])
def test_a_key_is_confirmed_if_redis_is_behind_the_disk(valkey: Valkey, tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.ADMIN)
            changed = await node.keys.patch(ACME, "r", issued.document.id, KeyPatch(name="renamed"))
            principal = await node.authenticator.authenticate(issued.text)
            valkey.command("FLUSHALL")
            if how == "older":
                await node.live.documents.put(replace(changed, rev=1))
            assert await node.authenticator.confirm(principal) == principal

    run(scenario)


def test_a_flag_key_that_has_a_document_has_the_rights_of_that_document(valkey: Valkey, tmp_path: Path) -> None:
    """For example, if `LORASERVE_API_KEY` is set for the commands and a server is started in the same environment."""
    data_dir = tmp_path / "data"
    documents = DocumentStore(data_dir)
    admin = create_key_offline(documents, role=Role.ADMIN, tenant=ANY_TENANT)
    elsewhere = generate_key()

    async def scenario() -> None:
        async with running_node(data_dir, valkey.url, flag_keys=(admin.text, elsewhere.text)) as node:
            await with_tenants(node)
            assert (await node.authenticator.authenticate(admin.text)).role is Role.ADMIN
            assert (await node.authenticator.authenticate(elsewhere.text)).role is Role.INFER
            await node.keys.revoke(ADMIN, "r", admin.document.id)
            assert await refusal(node, admin.text) is ErrorCode.INVALID_API_KEY

    run(scenario)


def test_a_flag_key_whose_document_only_redis_knows_is_refused(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url) as node:
            await with_tenants(node)
            await node.keys.create(ADMIN, "r", role=Role.ADMIN, tenant=ANY_TENANT)
            shutil.copytree(data_dir, copy)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            await node.keys.revoke(ACME, "r", issued.document.id)
        async with running_node(copy, valkey.url, follow=False, flag_keys=(issued.text,)) as again:
            assert await refusal(again, issued.text) is ErrorCode.INVALID_API_KEY
            valkey.command("FLUSHALL")
            again.live.view.forget()
            await again.catalog.synchronise()
            assert (await again.authenticator.authenticate(issued.text)).role is Role.INFER

    run(scenario)

import asyncio
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from loraserve.control.tenancy.audit_trail import AuditQuery, AuditTrail
from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.login_attempts import LOGINS_WINDOW_S, MAX_LOGINS, LoginAttempts
from loraserve.control.tenancy.sessions import REMEMBERED_S, NewSession, SessionService, is_csrf_token
from loraserve.live.sessions import MAX_SESSIONS
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import Role
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, Node, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]


def service(node: Node) -> SessionService:
    return SessionService(node.authenticator, node.live, LoginAttempts(clock=node.clock), clock=node.clock)


def test_a_session_has_the_current_rights_of_its_key(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.OPERATOR)
            sessions = service(node)
            new = await sessions.log_in_with_key(issued.text, "r")
            session = await sessions.find(new.token)
            assert session is not None
            assert (await sessions.principal(session, None)).role is Role.OPERATOR
            with pytest.raises(ServingError) as refused:
                await sessions.principal(session, "globex")
            assert refused.value.code is ErrorCode.FORBIDDEN
            assert is_csrf_token(session, session.csrf)
            assert not is_csrf_token(session, None)
            assert not is_csrf_token(session, new.token)
            await node.keys.revoke(ACME, "r", issued.document.id)
            with pytest.raises(ServingError) as refused:
                await sessions.principal(session, None)
            assert refused.value.code is ErrorCode.INVALID_API_KEY

    run(scenario)


def test_a_session_works_for_a_key_and_tenant_just_created_on_another_server(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            own = await one.keys.create(ACME, "r", role=Role.OPERATOR)
            everyones = await one.keys.create(ADMIN, "r", role=Role.ADMIN, tenant="*")
            here, there = service(one), service(two)
            for issued, acting_tenant, expected in ((own, None, "acme"), (everyones, "globex", "globex")):
                session = await there.find((await here.log_in_with_key(issued.text, "r")).token)
                assert session is not None
                assert (await there.principal(session, acting_tenant)).acting_tenant == expected
            link = await here.make_link(own.document.id, "somebody", "r")
            assert (await there.log_in_with_token(link.token, "r")).principal.key_id == own.document.id

    run(scenario)


def test_logging_out_ends_the_session_on_every_server(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            issued = await one.keys.create(ACME, "r", role=Role.VIEWER)
            here, there = service(one), service(two)
            token = (await here.log_in_with_key(issued.text, "r")).token
            assert await there.find(token) is not None
            await here.log_out(token, "r")
            assert await there.find(token) is None
            assert await here.find(token) is None
            await here.log_out(token, "r")

    run(scenario)


def test_inference_keys_cannot_log_in_to_the_console(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            sessions = service(node)
            with pytest.raises(ServingError) as refused:
                await sessions.log_in_with_key(issued.text, "r")
            assert refused.value.code is ErrorCode.FORBIDDEN
            with pytest.raises(ServingError) as refused:
                await sessions.make_link(issued.document.id, "admin", "r")
            assert refused.value.code is ErrorCode.FORBIDDEN

    run(scenario)


def test_a_login_link_works_only_once(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.ADMIN)
            sessions = service(node)
            link = await sessions.make_link(issued.document.id, "somebody", "r")
            new = await sessions.log_in_with_token(link.token, "r")
            assert new.principal.key_id == issued.document.id
            for token in (link.token, "made-up"):
                with pytest.raises(ServingError) as refused:
                    await sessions.log_in_with_token(token, "r")
                assert refused.value.code is ErrorCode.INVALID_API_KEY
            acts = [*await AuditTrail(node.live, node.documents).export(ADMIN, AuditQuery(kind="session"))]
            assert [(act.entry.actor, act.entry.action, act.entry.id) for act in acts] == [
                (issued.document.id, "session.login", issued.document.id),
                ("somebody", "session.link", issued.document.id),
            ]
            assert link.token not in repr(acts)

    run(scenario)


def test_repeated_logins_with_one_key_fill_neither_redis_nor_the_audit_list(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.VIEWER)
            other = await node.keys.create(ACME, "r", role=Role.VIEWER)
            sessions = service(node)
            link = await sessions.make_link(issued.document.id, "somebody", "r")
            for _ in range(MAX_LOGINS - 1):
                await sessions.log_in_with_key(issued.text, "r")
            for call in (
                sessions.log_in_with_key(issued.text, "r"),
                sessions.make_link(issued.document.id, "somebody", "r"),
            ):
                with pytest.raises(ServingError) as refused:
                    await call
                assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.RATE_LIMITED, LOGINS_WINDOW_S)
            # A link was counted when it was made, so it still works.
            assert (await sessions.log_in_with_token(link.token, "r")).principal.key_id == issued.document.id
            assert (await sessions.log_in_with_key(other.text, "r")).principal.key_id == other.document.id
            acts = [*await AuditTrail(node.live, node.documents).export(ADMIN, AuditQuery(kind="session"))]
            assert len(acts) == MAX_LOGINS + 2
            assert len(await node.live.connection.call("KEYS", "{ls}:s:*")) == MAX_SESSIONS + 1 + 2
            node.clock.now += LOGINS_WINDOW_S
            await sessions.log_in_with_key(issued.text, "r")

    run(scenario)


def test_a_login_link_of_a_key_revoked_since_is_refused(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.ADMIN)
            # So that the revoked key is not the server's only one.
            await node.keys.create(ACME, "r", role=Role.ADMIN)
            sessions = service(node)
            link = await sessions.make_link(issued.document.id, "somebody", "r")
            await node.keys.revoke(ACME, "r", issued.document.id)
            with pytest.raises(ServingError) as refused:
                await sessions.log_in_with_token(link.token, "r")
            assert refused.value.code is ErrorCode.INVALID_API_KEY

    run(scenario)


def test_a_login_that_fails_because_the_disk_lags_does_not_use_up_its_link(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir, copy = tmp_path / "data", tmp_path / "copy"
        async with running_node(data_dir, valkey.url, follow=False) as one:
            await with_tenants(one)
            issued = await one.keys.create(ACME, "r", role=Role.ADMIN)
            link = await service(one).make_link(issued.document.id, "somebody", "r")
            shutil.copytree(data_dir, copy)
            async with running_node(copy, valkey.url, follow=False) as lagging:
                await one.keys.patch(ACME, "r", issued.document.id, KeyPatch(name="renamed"))
                sessions = service(lagging)
                with pytest.raises(ServingError) as refused:
                    await sessions.log_in_with_token(link.token, "r")
                assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
                shutil.copytree(data_dir / "docs", copy / "docs", dirs_exist_ok=True)
                logins = (sessions.log_in_with_token(link.token, "r") for _ in range(5))
                results = await asyncio.gather(*logins, return_exceptions=True)
                assert sum(isinstance(result, NewSession) for result in results) == 1

    run(scenario)


@pytest.mark.parametrize("grace_s", [0.0, 600.0])
def test_a_session_and_a_link_end_with_the_secret_they_were_made_with(
    valkey: Valkey, tmp_path: Path, grace_s: float
) -> None:
    async def scenario() -> None:
        # The other server hears of the rotation only when it looks it up.
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            issued = await one.keys.create(ACME, "r", role=Role.ADMIN)
            key_id = issued.document.id
            await two.catalog.catch_up()
            here, there = service(one), service(two)
            before = (await here.log_in_with_key(issued.text, "r")).session
            used_within, used_after = [await here.make_link(key_id, "somebody", "r") for _ in range(2)]
            rotated = await one.keys.rotate(ACME, "r", key_id, grace_s=grace_s)
            assert (await there.log_in_with_key(rotated.text, "r")).principal.is_old_secret is False
            old = [before]
            if grace_s:
                old += [(await here.log_in_with_key(issued.text, "r")).session]
                old += [(await here.log_in_with_token(used_within.token, "r")).session]
                for session in old:
                    assert (await there.principal(session, None)).is_old_secret
                one.clock.now += grace_s
                two.clock.now += grace_s
            for session in old:
                with pytest.raises(ServingError) as refused:
                    await there.principal(session, None)
                assert refused.value.code is ErrorCode.INVALID_API_KEY
            with pytest.raises(ServingError) as refused:
                await here.log_in_with_token(used_after.token, "r")
            assert refused.value.code is ErrorCode.INVALID_API_KEY
            new = [(await here.log_in_with_key(rotated.text, "r")).session]
            link = await here.make_link(key_id, "somebody", "r")
            new += [(await here.log_in_with_token(link.token, "r")).session]
            for session in new:
                assert (await there.principal(session, None)).key_id == key_id

    run(scenario)


def test_a_session_opened_after_a_rotation_works_on_servers_that_have_not_heard_of_it(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url, follow=False) as (one, two):
            issued = await one.keys.create(ACME, "r", role=Role.VIEWER)
            await two.catalog.catch_up()
            rotated = await one.keys.rotate(ACME, "r", issued.document.id, grace_s=0)
            session = (await service(one).log_in_with_key(rotated.text, "r")).session
            assert (await service(two).principal(session, None)).key_id == issued.document.id

    run(scenario)


def test_a_session_and_a_link_that_name_no_secret_are_refused(valkey: Valkey, tmp_path: Path) -> None:
    """Older releases did not store it."""

    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.ADMIN)
            sessions = service(node)
            token, digest = "of-before", hashlib.sha256(b"of-before").hexdigest()
            record = {"token_sha256": digest, "key_id": issued.document.id, "created_at": node.clock.now}
            valkey.command("SET", f"{{ls}}:s:{digest}", json.dumps({**record, "csrf": "c"}))
            valkey.command("SET", f"{{ls}}:o:{digest}", json.dumps(record))
            session = await sessions.find(token)
            assert session is not None
            for call in (sessions.principal(session, None), sessions.log_in_with_token(token, "r")):
                with pytest.raises(ServingError) as refused:
                    await call
                assert refused.value.code is ErrorCode.INVALID_API_KEY

    run(scenario)


def test_recently_seen_users_stay_logged_in_for_a_minute_while_redis_is_gone(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.VIEWER)
            sessions = service(node)
            new = await sessions.log_in_with_key(issued.text, "r")
            other = await sessions.log_in_with_key(issued.text, "r")
            assert await sessions.find(new.token) is not None
            valkey.kill()
            assert await sessions.find(new.token) == new.session
            with pytest.raises(ServingError) as refused:
                await sessions.find(other.token)
            assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
            node.clock.now += REMEMBERED_S
            with pytest.raises(ServingError):
                await sessions.find(new.token)

    run(scenario)

from pathlib import Path

import pytest

from loraserve.control.audit_trail import AuditQuery, AuditTrail
from loraserve.control.sessions import REMEMBERED_S, SessionService, is_csrf_token
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import Role
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, Node, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]


def service(node: Node) -> SessionService:
    return SessionService(node.authenticator, node.live, clock=node.clock)


def test_a_session_is_worth_what_its_key_is_worth_now(valkey: Valkey, tmp_path: Path) -> None:
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


def test_a_session_of_a_key_and_tenant_just_made_on_another_server_is_known(valkey: Valkey, tmp_path: Path) -> None:
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


def test_keys_for_inference_do_not_open_the_console(valkey: Valkey, tmp_path: Path) -> None:
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


def test_a_link_logs_in_once(valkey: Valkey, tmp_path: Path) -> None:
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
            acts = await AuditTrail(node.live, node.documents).export(ADMIN, AuditQuery(kind="session"))
            assert [(act.entry.actor, act.entry.action, act.entry.id) for act in acts] == [
                (issued.document.id, "session.login", issued.document.id),
                ("somebody", "session.link", issued.document.id),
            ]
            assert link.token not in repr(acts)

    run(scenario)


def test_a_link_of_a_key_that_was_revoked_meanwhile_is_worth_nothing(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.ADMIN)
            # Without it the server would be open again.
            await node.keys.create(ACME, "r", role=Role.ADMIN)
            sessions = service(node)
            link = await sessions.make_link(issued.document.id, "somebody", "r")
            await node.keys.revoke(ACME, "r", issued.document.id)
            with pytest.raises(ServingError) as refused:
                await sessions.log_in_with_token(link.token, "r")
            assert refused.value.code is ErrorCode.INVALID_API_KEY

    run(scenario)


def test_people_stay_in_for_a_minute_while_redis_is_gone(valkey: Valkey, tmp_path: Path) -> None:
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

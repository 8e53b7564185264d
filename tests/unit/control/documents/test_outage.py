from pathlib import Path

import pytest

from loraserve.control.documents.outage import Outage
from loraserve.control.tenancy.offline_keys import revoke_key_offline
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.control.usage.outcome import Outcome
from loraserve.live.requests import EndState
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import DocumentKind, Limits, Role
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, DONE, Clock, eventually, run, running_node, with_tenants

__all__ = ["valkey"]

KEY = (DocumentKind.KEY, "a")
TENANT = (DocumentKind.TENANT, "t")


def test_allows_only_documents_confirmed_in_the_minute_before_and_only_during_the_grace_time() -> None:
    clock = Clock(0.0)
    outage = Outage(60.0, clock=clock)
    outage.confirm([KEY])
    assert not outage.allows([KEY])
    clock.now = 59.0
    outage.confirm([TENANT])
    outage.failed("no answer")
    assert outage.allows([KEY, TENANT])
    assert not outage.allows([KEY, (DocumentKind.KEY, "never seen")])
    clock.now = 59.0 + 60.0
    assert outage.allows([TENANT])
    clock.now += 0.1
    assert not outage.allows([TENANT])
    outage.succeeded()
    clock.now = 200.0
    outage.failed("no answer")
    # Confirmed 141 s before this outage.
    assert not outage.allows([TENANT])


def test_without_grace_time_nothing_is_allowed() -> None:
    outage = Outage(0.0, clock=Clock(0.0))
    outage.confirm([KEY])
    outage.failed("no answer")
    assert not outage.allows([KEY])


def test_an_outage_is_logged_once_whichever_caller_notices_it(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(0.0)
    outage = Outage(60.0, clock=clock)
    for reason in ("no answer", "found by another", "still"):
        outage.failed(reason)
        clock.now += 20
    outage.succeeded()
    outage.succeeded()
    assert caplog.messages == ["Redis is not reachable: no answer", "Redis is reachable again after 60 s"]


def test_a_flapping_redis_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(0.0)
    outage = Outage(60.0, clock=clock)
    for _ in range(20):
        outage.failed("comes and goes")
        clock.now += 0.5
        outage.succeeded()
    assert len(caplog.messages) == 2
    caplog.clear()
    for _ in range(20):
        outage.failed("stays away")
        clock.now += 1
    assert caplog.messages == ["Redis is not reachable: stays away"]


def test_recently_confirmed_principals_are_served_for_a_minute_while_redis_is_gone(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            await node.publish("math", "two")
            limits = Limits(requests_per_min=3)
            known = await node.keys.create(ACME, "r", role=Role.INFER, limits=limits)
            unknown = await node.keys.create(ACME, "r", role=Role.INFER)
            principal = await node.authenticator.authenticate(known.text)
            stranger = await node.authenticator.authenticate(unknown.text)
            before = await node.admit(principal, "sql")
            valkey.kill()
            await eventually(lambda: node.outage.began_s is not None)
            during = await node.admit(principal, "sql")
            for who, model in ((stranger, "sql"), (principal, "math")):
                with pytest.raises(ServingError) as refused:
                    await node.admit(who, model)
                assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
                assert refused.value.retry_after_s is not None
            # Running requests end as usual, and usage is still logged.
            await node.admission.finish(before, DONE)
            await node.admission.finish(during, Outcome(EndState.COMPLETED, "length", 3, 0, 5))
            assert [line.output_tokens for line in node.usage_lines()] == [6, 5]
            # The same limits apply, counted on this server.
            await node.admit(principal, "sql")
            await node.admit(principal, "sql")
            with pytest.raises(ServingError) as refused:
                await node.admit(principal, "sql")
            assert refused.value.code is ErrorCode.RATE_LIMITED
            node.steady.now += 61
            with pytest.raises(ServingError) as refused:
                await node.admit(principal, "sql")
            assert refused.value.code is ErrorCode.SERVICE_UNAVAILABLE
            valkey.start()
            await eventually(lambda: node.catalog.ready and node.outage.began_s is None)
            admitted = await node.admit(principal, "sql")
            assert admitted.headers["x-ratelimit-limit-requests"] == "3"

    run(scenario)


def test_successive_outages_share_one_budget(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(requests_per_min=2)))
            await node.admit(ACME)
            for num_left in (2, 0):
                node.steady.now += 1
                valkey.kill()
                await eventually(lambda: node.outage.began_s is not None)
                for _ in range(num_left):
                    await node.admit(ACME)
                with pytest.raises(ServingError) as refused:
                    await node.admit(ACME)
                assert refused.value.code is ErrorCode.RATE_LIMITED
                valkey.start()
                await eventually(lambda: node.catalog.ready and node.outage.began_s is None)

    run(scenario)


def test_tokens_of_a_request_admitted_without_redis_are_charged_when_it_ends(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=Limits(tokens_per_min=1000)))
            await node.admit(ACME)
            valkey.kill()
            await eventually(lambda: node.outage.began_s is not None)
            during = await node.admit(ACME, reserve=1000)
            valkey.start()
            await eventually(lambda: node.catalog.ready and node.outage.began_s is None)
            await node.live.leases.renew()
            await node.admit(ACME, reserve=900)
            await node.admission.finish(during, Outcome(EndState.COMPLETED, "stop", 60, 0, 40))
            admitted = await node.admit(ACME, reserve=0)
            # Only the tokens refilled since: a few, at 1,000 a minute.
            assert int(admitted.headers["x-ratelimit-remaining-tokens"]) < 90

    run(scenario)


def test_a_key_revoked_on_disk_during_an_outage_is_refused(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            principal = await node.authenticator.authenticate(issued.text)
            await node.admit(principal)
            valkey.kill()
            await eventually(lambda: node.outage.began_s is not None)
            await node.admit(principal)
            revoke_key_offline(node.documents, issued.document.id)
            await eventually(lambda: node.catalog.key(issued.document.id) != issued.document)
            with pytest.raises(ServingError) as refused:
                await node.admit(principal)
            assert refused.value.code is ErrorCode.INVALID_API_KEY

    run(scenario)


def test_a_restarted_empty_redis_is_filled_before_the_first_request_is_admitted(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, grace_s=0) as node:
            await with_tenants(node)
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            revoked = await node.keys.create(ACME, "r", role=Role.INFER)
            await node.keys.revoke(ACME, "r", revoked.document.id)
            principal = await node.authenticator.authenticate(issued.text)
            await node.admit(principal)
            valkey.restart()
            codes: set[ErrorCode] = set()
            admitted = None
            while admitted is None:
                try:
                    admitted = await node.admit(principal)
                except ServingError as error:
                    codes.add(error.code)
            assert codes <= {ErrorCode.SERVICE_UNAVAILABLE}
            revisions = await node.live.documents.all_revs(DocumentKind.KEY)
            assert revisions == {issued.document.id: 1, revoked.document.id: 2}

    run(scenario)

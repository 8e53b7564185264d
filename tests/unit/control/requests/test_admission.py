import asyncio
from pathlib import Path

import pytest

from loraserve.control.requests.admission import reserve_tokens
from loraserve.control.requests.records import record_of_ended
from loraserve.control.tenancy.key_documents import KeyPatch
from loraserve.control.tenancy.principal import OPEN_ACTOR, Principal, server_principal
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.control.usage.outcome import Outcome
from loraserve.live.admission_records import AdmitCall, AdmitReply
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.requests import EndState
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT, Limits, Role, Status
from loraserve.store.usage_log import BilledOutcome
from tests.support.live_documents import num_in_flight
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, DONE, Node, eventually, run, running_node, two_nodes, with_tenants

__all__ = ["valkey"]

ENGINE_SEQUENCES = 64
GLOBEX = server_principal("globex", "cli")


NOTHING_USED = Outcome(EndState.ABORTED, "abort", 0, 0, 0)


async def limited(node: Node, limits: Limits) -> None:
    await node.tenants.patch(ADMIN, "r", "acme", TenantPatch(limits=limits))


def test_reserves_a_quarter_of_the_prompt_bytes_and_at_most_256_tokens_per_choice() -> None:
    assert reserve_tokens(400, 16) == 100 + 16
    assert reserve_tokens(400, 100_000, 3) == 100 + 3 * 256


def test_one_request_produces_one_usage_line_and_one_terminal_state(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            digest = await node.publish("sql", "one")
            issued = await node.keys.create(ACME, "r", role=Role.INFER)
            principal = await node.authenticator.authenticate(issued.text)
            admitted = await node.admit(principal, "sql")
            assert len(node.running) == 1
            assert await num_in_flight(node.live, "acme") == 1
            node.steady.now += 2
            await node.admission.finish(admitted, DONE)
            await node.admission.finish(admitted, Outcome(EndState.FAILED, "error", 0, 0, 0))
            assert len(node.running) == 0
            assert await num_in_flight(node.live, "acme") == 0
            (line,) = node.usage_lines()
            assert (line.request_id, line.tenant, line.key_id) == (admitted.request_id, "acme", issued.document.id)
            assert (line.adapter, line.version, line.digest) == ("sql", 1, digest)
            assert (line.prompt_tokens, line.cached_tokens, line.output_tokens) == (10, 4, 6)
            assert (line.outcome, line.duration_ms) == (BilledOutcome.STOP, 2000)
            ended = await node.live.requests.ended("acme", admitted.request_id)
            assert ended is not None
            assert ended.state is EndState.COMPLETED
            assert await node.live.requests.ended("globex", admitted.request_id) is None

    run(scenario)


def test_setting_the_clock_back_does_not_change_the_duration_of_a_request(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            admitted = await node.admit(ACME)
            node.clock.now -= 3600
            node.steady.now += 2
            assert [record.duration_ms for record in node.snapshots.own_requests()] == [2000]
            await node.admission.finish(admitted, DONE)
            (line,) = node.usage_lines()
            assert (line.at, line.duration_ms) == (node.clock.now, 2000)
            ended = await node.live.requests.ended("acme", admitted.request_id)
            assert ended is not None
            record = record_of_ended(ended)
            assert record is not None
            assert record.duration_ms == 2000

    run(scenario)


def test_tokens_are_settled_exactly(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await limited(node, Limits(tokens_per_min=1000))
            admitted = await node.admit(ACME, reserve=400)
            assert admitted.headers["x-ratelimit-remaining-tokens"] == "600"
            assert admitted.headers["x-ratelimit-limit-tokens"] == "1000"
            await node.admission.finish(admitted, DONE)
            admitted = await node.admit(ACME, reserve=100)
            # 16 of 1,000 used and 100 reserved; a few may have been refilled since.
            assert 884 <= int(admitted.headers["x-ratelimit-remaining-tokens"]) <= 900
            await node.admission.finish(admitted, Outcome(EndState.COMPLETED, "stop", 1500, 0, 500))
            with pytest.raises(ServingError) as refused:
                await node.admit(ACME, reserve=1)
            assert refused.value.code is ErrorCode.RATE_LIMITED
            # In debt by about 1,000 tokens, which a minute pays back.
            assert refused.value.retry_after_s is not None
            assert 40 <= refused.value.retry_after_s <= 70

    run(scenario)


def test_the_tighter_of_key_and_tenant_limits_applies_and_says_when_to_retry(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await limited(node, Limits(requests_per_min=100))
            issued = await node.keys.create(ACME, "r", role=Role.INFER, limits=Limits(requests_per_min=2))
            principal = await node.authenticator.authenticate(issued.text)
            first = await node.admit(principal)
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            await node.admit(principal)
            with pytest.raises(ServingError) as refused:
                await node.admit(principal)
            assert refused.value.retry_after_s is not None
            assert 20 <= refused.value.retry_after_s <= 30
            assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
            assert "key" in refused.value.message
            # The tenant's other requests are still admitted.
            await node.admit(ACME)

    run(scenario)


def test_a_limit_of_zero_refuses_without_a_retry_time(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await limited(node, Limits(requests_per_min=0))
            with pytest.raises(ServingError) as refused:
                await node.admit(ACME)
            assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.RATE_LIMITED, None)

    run(scenario)


def test_requests_in_flight_are_limited_across_two_servers(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            await limited(one, Limits(max_concurrent=1))
            admitted = await one.admit(ACME)
            await eventually(lambda: two.catalog.tenant("acme") is not None)
            with pytest.raises(ServingError) as refused:
                await two.admit(ACME)
            assert refused.value.code is ErrorCode.RATE_LIMITED
            await one.admission.finish(admitted, DONE)
            await two.admit(ACME)

    run(scenario)


def test_a_server_that_has_not_heard_of_a_moved_alias_follows_it(valkey: Valkey, tmp_path: Path) -> None:
    """STALE: it admits with the new version, not with the one in its memory."""

    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            await one.publish("sql", "one")
            async with running_node(data_dir, valkey.url, follow=False) as deaf:
                second = await one.publish("sql", "two")
                stale = deaf.catalog.adapter("acme", "sql")
                assert stale is not None
                assert stale.rev == 1
                admitted = await deaf.admit(ACME, "sql")
                assert admitted.target.adapter is not None
                assert (admitted.target.adapter.version, admitted.target.adapter.digest) == (2, second)
                assert admitted.running.target is admitted.target

    run(scenario)


def test_a_server_that_has_not_heard_of_a_revocation_refuses_the_key(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            issued = await one.keys.create(ACME, "r", role=Role.INFER)
            async with running_node(data_dir, valkey.url, follow=False) as deaf:
                principal = await deaf.authenticator.authenticate(issued.text)
                await one.keys.revoke(ACME, "r", issued.document.id)
                with pytest.raises(ServingError) as refused:
                    await deaf.admit(principal)
                assert refused.value.code is ErrorCode.INVALID_API_KEY

    run(scenario)


@pytest.mark.parametrize("change", ["suspended", "demoted", "tenant suspended", "adapter deleted", "limits"])
def test_a_server_that_has_not_heard_of_a_restriction_enforces_it(valkey: Valkey, tmp_path: Path, change: str) -> None:
    expected = {
        "suspended": ErrorCode.INVALID_API_KEY,
        "demoted": ErrorCode.FORBIDDEN,
        "tenant suspended": ErrorCode.TENANT_SUSPENDED,
        "adapter deleted": ErrorCode.MODEL_NOT_FOUND,
        "limits": ErrorCode.RATE_LIMITED,
    }

    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            await one.publish("sql", "one")
            issued = await one.keys.create(ACME, "r", role=Role.OPERATOR)
            async with running_node(data_dir, valkey.url, follow=False) as deaf:
                principal = await deaf.authenticator.authenticate(issued.text)
                match change:
                    case "suspended":
                        await one.keys.patch(ACME, "r", issued.document.id, KeyPatch(status=Status.SUSPENDED))
                    case "demoted":
                        await one.keys.patch(ACME, "r", issued.document.id, KeyPatch(role=Role.VIEWER))
                    case "tenant suspended":
                        await one.tenants.patch(ADMIN, "r", "acme", TenantPatch(status=Status.SUSPENDED))
                    case "adapter deleted":
                        await one.adapters.delete(ACME, "r", "sql", drain_s=0)
                    case _:
                        await limited(one, Limits(requests_per_min=0))
                with pytest.raises(ServingError) as refused:
                    await deaf.admit(principal, "sql")
                assert refused.value.code is expected[change]
                assert await num_in_flight(deaf.live, "acme") == 0

    run(scenario)


@pytest.mark.parametrize("given", [["sql"], None])
def test_a_server_that_has_not_heard_that_a_key_may_use_an_adapter_admits_it(
    valkey: Valkey, tmp_path: Path, given: list[str] | None
) -> None:
    async def scenario() -> None:
        data_dir = tmp_path / "data"
        async with running_node(data_dir, valkey.url) as one:
            await with_tenants(one)
            await one.publish("sql", "one")
            issued = await one.keys.create(ACME, "r", role=Role.INFER, adapters=["other"])
            async with running_node(data_dir, valkey.url, follow=False) as deaf:
                principal = await deaf.authenticator.authenticate(issued.text)
                with pytest.raises(ServingError) as refused:
                    await deaf.admit(principal, "sql")
                assert refused.value.code is ErrorCode.MODEL_NOT_FOUND
                await one.keys.patch(ACME, "r", issued.document.id, KeyPatch(adapters=given))
                admitted = await deaf.admit(principal, "sql")
                assert admitted.principal.may_use("sql")
                assert admitted.target.adapter is not None

    run(scenario)


def test_a_cancelled_admission_leaves_no_lease(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await limited(node, Limits(tokens_per_min=10_000))
            for turns in range(30):
                task = asyncio.create_task(node.admit(ACME, reserve=100))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                (result,) = await asyncio.gather(task, return_exceptions=True)
                if not isinstance(result, BaseException):
                    await node.admission.finish(result, Outcome(EndState.ABORTED, "abort", 0, 0, 0))
            await node.admission.close()
            assert await num_in_flight(node.live, "acme") == 0
            admitted = await node.admit(ACME, reserve=0)
            assert admitted.headers["x-ratelimit-remaining-tokens"] == "10000"
            assert len(node.running) == 1

    run(scenario)


@pytest.mark.parametrize("is_renewed", [False, True])
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_reservation_whose_answer_was_lost_is_not_charged_in_addition_to_actual_use(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool, is_renewed: bool
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            await limited(node, Limits(tokens_per_min=1_000))
            await node.admission.finish(await node.admit(ACME, reserve=0), NOTHING_USED)
            admit = node.live.admission.admit

            async def lose_answer(call: AdmitCall) -> AdmitReply:
                if is_taken:
                    await admit(call)
                    await node.live.leases.drop(call.lease.request_id)  # as if its answer had been lost
                raise LiveUnavailableError("cut off")

            with monkeypatch.context() as patches:
                patches.setattr(node.live.admission, "admit", lose_answer)
                admitted = await node.admit(ACME, reserve=600)
            assert admitted.is_local
            if is_renewed:
                await node.live.leases.renew()
                await node.live.leases.renew()
            await node.admission.finish(admitted, Outcome(EndState.COMPLETED, "stop", 60, 0, 40))
            admitted = await node.admit(ACME, reserve=0)
            num_charged = 100 if is_taken or is_renewed else 0
            # A few tokens are refilled in between.
            assert 0 <= int(admitted.headers["x-ratelimit-remaining-tokens"]) - (1_000 - num_charged) < 100

    run(scenario)


def test_each_tenants_queue_has_its_own_limit(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, max_queued=20, max_queued_per_tenant=5) as node:
            await with_tenants(node)
            # As many sequences as the engine runs at once do not count as queued, started or not.
            first = await node.admit(ACME, num_sequences=ENGINE_SEQUENCES)
            first.running.started = True
            for _ in range(5):
                await node.admit(ACME)
            with pytest.raises(ServingError) as refused:
                await node.admit(ACME)
            assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.QUEUE_FULL, 1)
            assert "Your tenant" in refused.value.message
            for principal in (ADMIN, ADMIN, ADMIN, ADMIN, ADMIN, *[GLOBEX] * 5):
                await node.admit(principal)
            await limited(node, Limits(max_queued=100))
            for _ in range(5):
                await node.admit(ACME)
            with pytest.raises(ServingError) as refused:
                await node.admit(ACME)
            assert "The server" in refused.value.message

    run(scenario)


def test_a_tenant_may_fill_32_places_of_the_queue_and_users_of_an_open_server_all_of_them(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, max_queued=100) as node:
            await with_tenants(node)
            for principal, whose, limit in (
                (ACME, "Your tenant", 32),
                (Principal(OPEN_ACTOR, Role.ADMIN, ANY_TENANT, "globex"), "The server", 100),
            ):
                burst = await asyncio.gather(*(node.admit(principal) for _ in range(300)), return_exceptions=True)
                messages = {error.message for error in burst if isinstance(error, ServingError)}
                assert messages == {f"{whose} has {limit} sequences waiting; the limit is {limit}. Retry later."}
            assert node.running.num_sequences() == ENGINE_SEQUENCES + 100

    run(scenario)


def test_a_burst_is_cut_at_its_tenants_queue_limit_and_leaves_room_for_others(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, max_queued=20, max_queued_per_tenant=5) as node:
            await with_tenants(node)
            results = await asyncio.gather(*(node.admit(ACME) for _ in range(400)), return_exceptions=True)
            refused = [result for result in results if isinstance(result, ServingError)]
            admitted = [result for result in results if not isinstance(result, BaseException)]
            assert (len(admitted), len(refused)) == (ENGINE_SEQUENCES + 5, 400 - ENGINE_SEQUENCES - 5)
            assert all("Your tenant" in error.message for error in refused)
            await node.admit(GLOBEX)
            assert node.running.num_sequences() == node.running.num_queued() == ENGINE_SEQUENCES + 6

    run(scenario)


def test_refused_and_cancelled_requests_do_not_stay_in_the_queue(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url) as node:
            await with_tenants(node)
            leaving = asyncio.create_task(node.admit(ACME, num_sequences=3))
            while node.running.num_queued(tenant="acme") == 0:
                await asyncio.sleep(0)
            assert (node.running.num_queued(tenant="acme"), node.running.num_queued(tenant="globex")) == (3, 0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await limited(node, Limits(requests_per_min=0))
            with pytest.raises(ServingError):
                await node.admit(ACME)
            assert node.running.num_sequences() == 0

    run(scenario)


def test_a_flag_key_infers_only_for_the_default_tenant(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, flag_keys=("let-me-in",)) as node:
            await with_tenants(node)
            principal = await node.authenticator.authenticate("let-me-in")
            admitted = await node.admit(principal)
            await node.admission.finish(admitted, DONE)
            (line,) = node.usage_lines()
            assert (line.tenant, line.key_id) == ("default", "flag")
            with pytest.raises(ServingError):
                await node.authenticator.authenticate("let-me-out")
            with pytest.raises(ServingError):
                await node.authenticator.authenticate("let-me-in", "acme")

    run(scenario)

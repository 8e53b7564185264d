import asyncio
from pathlib import Path

import pytest

from loraserve.control.paging import encode_cursor
from loraserve.control.requests.service import RequestQuery, RequestService
from loraserve.control.requests.snapshot_records import RequestRecord, RequestState
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.control.usage.outcome import Outcome
from loraserve.live.admission import LiveAdmission
from loraserve.live.admission_records import FinishCall, FinishReply
from loraserve.live.requests import EndState
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT, Role
from tests.support.valkey import Valkey, valkey
from tests.unit.control.monitoring.test_live_views import snapshots_of
from tests.unit.control.nodes import ACME, ADMIN, DONE, Node, run, running_node, two_nodes, with_tenants
from tests.unit.control.requests.test_settlements import blip

__all__ = ["valkey"]

GLOBEX = server_principal("globex", "cli")
OPERATOR = Principal("k", Role.OPERATOR, "acme", "acme", "k")
FOREIGN = Principal("k", Role.OPERATOR, "globex", "globex", "k")


def service(node: Node) -> RequestService:
    return RequestService(node.catalog, node.live, snapshots_of(node))


def service_on(node: Node) -> RequestService:
    """As the node's own, which reports its own requests to other nodes."""
    return RequestService(node.catalog, node.live, node.snapshots)


async def ended(node: Node, principal: Principal, model: str = "tiny", outcome: Outcome = DONE) -> str:
    admitted = await node.admit(principal, model)
    node.clock.now += 1
    node.steady.now += 1
    await node.admission.finish(admitted, outcome)
    return admitted.request_id


async def all_pages(requests: RequestService, principal: Principal, limit: int, **query: object) -> list[RequestRecord]:
    found: list[RequestRecord] = []
    cursor: str | None = None
    while True:
        page = await requests.list(principal, RequestQuery(limit=limit, cursor=cursor, **query))  # pyright: ignore
        assert len(page.items) <= limit
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found


def test_running_requests_are_listed_first_and_pages_skip_none(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            over = [await ended(node, ACME, "sql") for _ in range(5)]
            running = []
            for _ in range(3):
                node.clock.now += 1
                running.append((await node.admit(ACME)).request_id)
            requests = service(node)
            for limit in (1, 2, 3, 4, 100):
                found = await all_pages(requests, OPERATOR, limit)
                assert [record.id for record in found] == [*reversed(running), *reversed(over)]
            record = found[3]
            assert (record.state, record.adapter, record.version) == (RequestState.STOP, "sql", 1)
            assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (10, 4, 6)
            assert (record.ttft_ms, record.duration_ms) == (1.0, 1000.0)
            assert (await requests.get(OPERATOR, over[0])).id == over[0]
            assert (await requests.get(OPERATOR, running[0])).state is RequestState.RUNNING

    run(scenario)


def test_requests_are_filtered(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await node.publish("sql", "one")
            sql = await ended(node, ACME, "sql")
            cut = await ended(node, ACME, outcome=Outcome(EndState.COMPLETED, "length", 1, 0, 1))
            left = await ended(node, ACME, outcome=Outcome(EndState.ABORTED, "abort", 1, 0, 1))
            bad = await ended(node, ACME, outcome=Outcome(EndState.FAILED, "error", 1, 0, 0, error_code="not_finite"))
            now = (await node.admit(ACME)).request_id
            requests = service(node)

            async def ids(**query: object) -> list[str]:
                return [record.id for record in await all_pages(requests, OPERATOR, 2, **query)]

            assert await ids(adapter="sql") == [sql]
            assert await ids(adapter="") == [now, bad, left, cut]
            assert await ids(key_id="nobody") == []
            for state, expected in (
                (RequestState.RUNNING, now),
                (RequestState.STOP, sql),
                (RequestState.LENGTH, cut),
                (RequestState.ABORT, left),
                (RequestState.ERROR, bad),
            ):
                assert await ids(state=state) == [expected]
            assert (await requests.get(OPERATOR, bad)).error == "not_finite"

    run(scenario)


def test_a_tenants_requests_are_not_found_by_others(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            over, running = await ended(node, ACME), (await node.admit(ACME)).request_id
            requests = service(node)
            assert await all_pages(requests, FOREIGN, 10) == []
            for request_id in (over, running, "missing", "a b", "{ls}:x"):
                for call in (requests.get, requests.abort):
                    with pytest.raises(ServingError) as refused:
                        await call(FOREIGN, request_id)
                    assert refused.value.code is ErrorCode.NOT_FOUND
                    assert refused.value.message.replace(request_id, "X") == (
                        "The request 'X' is not known, or ended too long ago."
                    )
            with pytest.raises(ServingError) as refused:
                await requests.list(FOREIGN, RequestQuery(tenant="acme"))
            assert refused.value.code is ErrorCode.FORBIDDEN
            with pytest.raises(ServingError):
                await requests.list(FOREIGN, RequestQuery(tenant=ANY_TENANT))
            assert node.running.get(running) is not None

    run(scenario)


def test_operators_of_all_tenants_can_page_through_all_requests(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            over = [await ended(node, (ACME, GLOBEX)[number % 2]) for number in range(7)]
            requests = service(node)
            whole = [record.id for record in await all_pages(requests, ADMIN, 100, tenant=ANY_TENANT)]
            assert sorted(whole) == sorted(over)
            # Only each tenant's own order is fixed: requests of two tenants may end within one millisecond.
            for first in (0, 1):
                assert [found for found in whole if found in over[first::2]] == [*reversed(over[first::2])]
            for limit in (1, 2, 3):
                found = await all_pages(requests, ADMIN, limit, tenant=ANY_TENANT)
                assert [record.id for record in found] == whole
            found = await all_pages(requests, ADMIN, 2, tenant="globex")
            assert {record.tenant for record in found} == {"globex"}
            with pytest.raises(ServingError) as refused:
                await requests.list(ADMIN, RequestQuery(tenant="nobody"))
            assert refused.value.code is ErrorCode.NOT_FOUND

    run(scenario)


def test_an_operator_can_abort_a_request_but_a_viewer_cannot(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            admitted = await node.admit(ACME)
            requests = service(node)
            with pytest.raises(ServingError) as refused:
                await requests.abort(Principal("k", Role.VIEWER, "acme", "acme", "k"), admitted.request_id)
            assert refused.value.code is ErrorCode.FORBIDDEN
            assert admitted.running.ended_with is None
            await requests.abort(OPERATOR, admitted.request_id)
            assert admitted.running.ended_with is not None
            await node.admission.finish(admitted, Outcome(EndState.ABORTED, "abort", 1, 0, 1))
            await requests.abort(OPERATOR, admitted.request_id)

    run(scenario)


def test_a_request_is_known_on_every_server_while_its_end_is_reported_to_redis(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        reporting, may_report = asyncio.Event(), asyncio.Event()
        finish = LiveAdmission.finish

        async def finish_slowly(live: LiveAdmission, call: FinishCall) -> FinishReply:
            reporting.set()
            await may_report.wait()
            return await finish(live, call)

        monkeypatch.setattr(LiveAdmission, "finish", finish_slowly)
        async with two_nodes(tmp_path / "data", valkey.url) as (node, other):
            admitted = await node.admit(ACME)
            await node.snapshots.publish()
            is_running = RequestQuery(state=RequestState.RUNNING)
            for server in (node, other):
                assert len((await service_on(server).list(OPERATOR, is_running)).items) == 1
            finishing = asyncio.create_task(node.admission.finish(admitted, DONE))
            await reporting.wait()
            await node.snapshots.publish()
            for server in (node, other):
                requests = service_on(server)
                assert (await requests.get(OPERATOR, admitted.request_id)).state is RequestState.STOP
                for query in ({}, {"state": RequestState.STOP}):
                    found = await all_pages(requests, OPERATOR, 1, **query)
                    assert [record.state for record in found] == [RequestState.STOP]
                assert (await requests.list(OPERATOR, is_running)).items == []
            may_report.set()
            await finishing
            assert node.admission.unsettled() == []
            for server in (node, other):
                requests = service_on(server)
                assert (await requests.get(OPERATOR, admitted.request_id)).state is RequestState.STOP
                page = await requests.list(OPERATOR, RequestQuery())
                assert [record.id for record in page.items] == [admitted.request_id]

    run(scenario)


@pytest.mark.parametrize("ends", [False, True])
def test_a_request_is_known_and_can_be_ended_on_another_server_before_its_own_has_reported_it(
    valkey: Valkey, tmp_path: Path, ends: bool
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (node, other):
            admitted = await node.admit(ACME)
            requests = service_on(other)
            getting = asyncio.create_task(requests.get(OPERATOR, admitted.request_id))
            ending = asyncio.create_task(requests.abort(OPERATOR, admitted.request_id))
            await asyncio.sleep(0.05)
            if ends:
                await node.admission.finish(admitted, DONE)
            else:
                await node.snapshots.publish()
            assert (await getting).state is (RequestState.STOP if ends else RequestState.RUNNING)
            await ending
            await node.snapshots.publish()
            assert (admitted.running.ended_with is None) == ends

    run(scenario)


def test_a_request_that_ran_in_an_outage_is_known_while_its_lease_is_being_renewed(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            await ended(node, ACME)  # Redis confirms the documents
            with blip(node.live):
                admitted = await node.admit(ACME)
            assert admitted.is_local
            renewing, may_renew = asyncio.Event(), asyncio.Event()
            server_time_ms = node.live.connection.server_time_ms

            async def answer_slowly() -> int:
                renewing.set()
                await may_renew.wait()
                return await server_time_ms()

            monkeypatch.setattr(node.live.connection, "server_time_ms", answer_slowly)
            renewal = asyncio.create_task(node.live.leases.renew())
            await renewing.wait()
            finishing = asyncio.create_task(node.admission.finish(admitted, DONE))
            await asyncio.sleep(0)
            requests = service(node)
            assert (await requests.get(OPERATOR, admitted.request_id)).state is RequestState.STOP
            may_renew.set()
            await asyncio.gather(renewal, finishing)
            assert node.admission.unsettled() == []
            assert (await requests.get(OPERATOR, admitted.request_id)).state is RequestState.STOP

    run(scenario)


def test_pages_skip_none_if_another_servers_requests_have_ended_since_it_reported_them(
    valkey: Valkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (node, other):
            over = [await ended(node, ACME) for _ in range(3)]
            admitted = [await node.admit(ACME) for _ in range(2)]
            await node.snapshots.publish()
            for each in admitted:
                await node.admission.finish(each, DONE)
            ids = [each.request_id for each in reversed(admitted)] + over[::-1]
            for limit in (1, 2):
                found = await all_pages(service_on(other), OPERATOR, limit)
                assert sorted(record.id for record in found) == sorted(ids)
            stopped = await all_pages(service_on(other), OPERATOR, 2, state=RequestState.STOP)
            assert [record.id for record in stopped] == ids
            page = await service_on(other).list(OPERATOR, RequestQuery(limit=3))
            assert {record.id for record in page.items} == {over[-1], *(each.request_id for each in admitted)}
            assert page.next_cursor is not None
            last = await service_on(other).list(OPERATOR, RequestQuery(limit=3, cursor=page.next_cursor))
            assert [record.id for record in last.items] == [over[1], over[0]]

    run(scenario)


MADE_UP = ("run", "run:1.2.3:x", "run:1-2:x", "end:12:x", "end:1.2-3:x", f"end:{10**20}-1:x", "end:0-0:x")


@pytest.mark.parametrize("cursor", ["!", *map(encode_cursor, MADE_UP)])
def test_a_made_up_cursor_is_refused(valkey: Valkey, tmp_path: Path, cursor: str) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            with pytest.raises(ServingError) as refused:
                await service(node).list(OPERATOR, RequestQuery(cursor=cursor))
            assert refused.value.param == "cursor"

    run(scenario)

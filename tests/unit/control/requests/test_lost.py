import time
from dataclasses import replace
from pathlib import Path

import pytest

from loraserve.control.requests.lost import LostRequests
from loraserve.control.requests.records import record_of_ended
from loraserve.control.requests.running import Progress, Route, RouteInfo
from loraserve.control.requests.service import RequestQuery, RequestService
from loraserve.control.requests.snapshot_records import RequestState
from loraserve.control.usage.outcome import Outcome
from loraserve.live import leases
from loraserve.live.admission_records import FinishCall, FinishReply
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.requests import EndState
from loraserve.live.snapshots import SnapshotKind
from tests.support.live_documents import num_in_flight
from tests.support.valkey import Valkey, valkey
from tests.unit.control.monitoring.test_live_views import snapshots_of
from tests.unit.control.nodes import ACME, DONE, Node, run, running_node, with_tenants
from tests.unit.control.requests.test_service import OPERATOR

__all__ = ["valkey"]


class Unreachable:
    """In place of `LiveAdmission`."""

    async def finish(self, call: FinishCall) -> FinishReply:
        raise LiveUnavailableError(f"no answer about {call.lease.request_id}")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease lapses if it is not renewed; here it counts as lapsed from the start."""
    monkeypatch.setattr(leases, "LAPSED_AFTER_MS", -leases.LEASE_MS - 1000)


async def killed(node: Node, *, tell: bool) -> str:
    """A request whose process dies while it runs."""
    await with_tenants(node)
    await node.publish("sql", "one")
    admitted = await node.admit(ACME, "sql")
    admitted.running.route_info = RouteInfo(Route.CHAT, stream=True)
    admitted.running.progress = lambda: Progress(num_prompt_tokens=5, num_output_tokens=2)
    if tell:
        dying = snapshots_of(node, admitted.lease.process)
        await dying.publish()
        await node.live.snapshots.remove(SnapshotKind.PROCESS, admitted.lease.process)
    node.running.remove(admitted.request_id)
    # Redis has been up long enough for every server to have reported.
    node.live.connection.up_since = time.monotonic() - 60
    return admitted.request_id


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("tell", [True, False])
def test_requests_of_a_dead_process_end_as_lost_once(valkey: Valkey, tmp_path: Path, *, tell: bool) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            request_id = await killed(node, tell=tell)
            survivor = snapshots_of(node, "survivor", "engine-1")
            lost = LostRequests(node.live, survivor)
            assert [await lost.sweep(), await lost.sweep()] == [1, 0]
            record = await RequestService(node.catalog, node.live, survivor).get(OPERATOR, request_id)
            assert record.state is RequestState.LOST
            if tell:
                assert (record.adapter, record.version, record.route, record.stream) == (
                    *("sql", 1),
                    *("chat.completions", True),
                )
                assert (record.num_prompt_tokens, record.num_output_tokens) == (5, 2)
            assert await num_in_flight(node.live, "acme") == 0
            assert node.usage_lines() == []

    run(scenario)


@pytest.mark.usefixtures("at_once")
def test_a_dead_process_requests_are_known_until_they_are_lost(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            request_id = await killed(node, tell=True)
            survivor = snapshots_of(node, "survivor", "engine-1")
            requests = RequestService(node.catalog, node.live, survivor)
            assert (await requests.get(OPERATOR, request_id)).state is RequestState.RUNNING
            assert [record.id for record in (await requests.list(OPERATOR, RequestQuery())).items] == [request_id]
            assert await LostRequests(node.live, survivor).sweep() == 1
            assert (await requests.get(OPERATOR, request_id)).state is RequestState.LOST
            page = await requests.list(OPERATOR, RequestQuery())
            assert [(record.id, record.state) for record in page.items] == [(request_id, RequestState.LOST)]
            running = RequestQuery(state=RequestState.RUNNING)
            assert (await requests.list(OPERATOR, running)).items == []

    run(scenario)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (DONE, RequestState.STOP),
        (replace(DONE, finish_reason="length"), RequestState.LENGTH),
        (replace(DONE, ending=EndState.ABORTED), RequestState.ABORT),
        (replace(DONE, ending=EndState.FAILED, error_code="internal_error"), RequestState.ERROR),
    ],
)
def test_a_request_that_had_ended_before_its_process_died_is_not_lost(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, state: RequestState
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            admitted = await node.admit(ACME)
            with monkeypatch.context() as patched:
                patched.setattr(node.admission._settlements, "_live", Unreachable())
                await node.admission.finish(admitted, outcome)
            await node.live.leases.drop(admitted.request_id)
            await snapshots_of(node, admitted.lease.process).publish()
            await node.live.snapshots.remove(SnapshotKind.PROCESS, admitted.lease.process)
            node.live.connection.up_since = time.monotonic() - 60
            survivor = snapshots_of(node, "survivor", "engine-1")
            assert await LostRequests(node.live, survivor).sweep() == 1
            ended = await node.live.requests.ended("acme", admitted.request_id)
            assert ended is not None
            assert ended.state is outcome.ending
            record = record_of_ended(ended)
            assert record is not None
            assert (record.state, record.error, record.num_output_tokens) == (state, outcome.error_code, 6)
            assert len(node.usage_lines()) == 1

    run(scenario)


@pytest.mark.usefixtures("at_once")
def test_a_live_process_keeps_its_requests(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            admitted = await node.admit(ACME)
            snapshots = snapshots_of(node, admitted.lease.process)
            await snapshots.publish()
            node.live.connection.up_since = time.monotonic() - 60
            assert await LostRequests(node.live, snapshots).sweep() == 0
            await node.admission.finish(admitted, DONE)
            assert len(node.usage_lines()) == 1

    run(scenario)

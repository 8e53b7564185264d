import time
from pathlib import Path

import pytest

from loraserve.control.requests.lost import LostRequests
from loraserve.control.requests.running import Progress, Route, RouteInfo
from loraserve.control.requests.service import RequestQuery, RequestService
from loraserve.control.requests.snapshot_records import RequestState
from loraserve.live import leases
from loraserve.live.snapshots import SnapshotKind
from tests.support.live_documents import num_in_flight
from tests.support.valkey import Valkey, valkey
from tests.unit.control.monitoring.test_live_views import snapshots_of
from tests.unit.control.nodes import ACME, DONE, Node, run, running_node, with_tenants
from tests.unit.control.requests.test_service import OPERATOR

__all__ = ["valkey"]


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

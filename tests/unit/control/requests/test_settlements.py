import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loraserve.control import control_plane
from loraserve.control.requests import settlements
from loraserve.control.requests.admitted import Admitted
from loraserve.control.requests.running import Demand
from loraserve.control.requests.settlements import Settlements
from loraserve.live.live_store import LiveStore
from loraserve.live.requests import EndState
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_documents import admit_call, build_usual_view, finish_call, num_in_flight
from tests.support.live_server import live_server, make_settings
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, DONE, Node, run, running_node, with_tenants
from tests.unit.live.conftest import run_check

__all__ = ["valkey"]


@contextmanager
def blip(live: LiveStore) -> Iterator[None]:
    """Redis keeps its data but cannot be reached."""
    breaker = live.connection._breaker
    breaker.failed("a blip")
    breaker._next_probe_at = float("inf")
    yield
    breaker.succeeded()


async def finish_in_a_blip(node: Node) -> list[Admitted]:
    await with_tenants(node)
    admitted = [await node.admit(ACME) for _ in range(3)]
    with blip(node.live):
        for each in admitted:
            await node.admission.finish(each, DONE)
        await node.admission.settle_again()
    assert await num_in_flight(node.live) == 3
    return admitted


async def check_settled(node: Node, admitted: list[Admitted]) -> None:
    assert await node.live.connection.call("ZCARD", "{ls}:l:all") == 0
    assert await num_in_flight(node.live, "acme") == 0
    for each in admitted:
        ended = await node.live.requests.ended("acme", each.request_id)
        assert ended is not None
        assert ended.state is EndState.COMPLETED
    assert len(node.usage_lines()) == len(admitted)


def test_requests_that_ended_while_redis_was_gone_are_settled_when_it_is_back(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            admitted = await finish_in_a_blip(node)
            await node.admission.settle_again()
            await check_settled(node, admitted)

    run(scenario)


def test_a_server_that_stops_settles_remaining_requests(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            admitted = await finish_in_a_blip(node)
            await node.admission.close()
            await check_settled(node, admitted)

    run(scenario)


def test_a_running_server_settles_requests_periodically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "SETTLE_EVERY_S", 0.01)
    with live_server(FakeEngine(), make_settings(tmp_path)) as server:
        control = server.context.control

        async def finish() -> str:
            target = await control.resolver.resolve(ADMIN, "tiny")
            admitted = await control.admission.admit(ADMIN, target, "r1", Demand(1), time.monotonic())
            with blip(control.live):
                await control.admission.finish(admitted, DONE)
            return admitted.request_id

        async def until_settled(request_id: str) -> None:
            while await control.live.requests.ended("default", request_id) is None:
                await asyncio.sleep(0.01)

        request_id = server.run(finish())
        server.run(asyncio.wait_for(until_settled(request_id), 20))


def test_the_oldest_of_too_many_unsettled_requests_are_dropped(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlements, "MAX_UNSETTLED", 2)

    async def check(store: LiveStore) -> None:
        await build_usual_view(store)
        unsettled = Settlements(store.admission)
        calls = [admit_call(f"r{number}") for number in range(3)]
        for call in calls:
            await store.admission.admit(call)
        with blip(store):
            assert [await unsettled.settle(finish_call(call)) for call in calls] == [False, False, False]
        await unsettled.retry()
        ended = [await store.requests.ended("acme", call.lease.request_id) for call in calls]
        assert [request is not None for request in ended] == [False, True, True]

    run_check(valkey.url, check)

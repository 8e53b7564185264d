import asyncio
from functools import partial
from pathlib import Path

import pytest

from loraserve.control.requests.running import Progress, Route, RouteInfo
from loraserve.control.requests.snapshot_records import EngineState, RequestState
from loraserve.control.requests.snapshots import LONG_STEPS, engine_state
from loraserve.engine.request import EngineStats
from loraserve.serving.errors import ErrorCode, ServingError
from tests.support.valkey import Valkey, valkey
from tests.unit.control.monitoring.test_live_views import snapshots_of
from tests.unit.control.nodes import ACME, Node, eventually, run, running_node, two_nodes

__all__ = ["valkey"]


def test_every_server_knows_the_requests_of_all_servers(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            await one.publish("sql", "one")
            first, second = snapshots_of(one, "p1", "engine-0"), snapshots_of(two, "p2", "engine-1")
            admitted = await one.admit(ACME, "sql")
            admitted.running.route_info = RouteInfo(Route.CHAT, stream=True)
            admitted.running.progress = lambda: Progress(num_prompt_tokens=5, num_output_tokens=2)
            await first.publish()
            await second.publish()
            found = await second.requests()
            assert set(found) == {"p1", "p2"}
            (record,) = found["p1"]
            assert (record.id, record.adapter, record.version) == (admitted.request_id, "sql", 1)
            assert (record.route, record.stream, record.state) == ("chat.completions", True, RequestState.RUNNING)
            assert (record.num_prompt_tokens, record.num_output_tokens) == (5, 2)
            assert sorted(await second.engines()) == ["engine-0", "engine-1"]
            await first.withdraw()
            assert set(await second.requests()) == {"p2"}

    run(scenario)


def test_a_request_is_aborted_on_the_server_that_runs_it(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            first, second = snapshots_of(one, "p1", "engine-0"), snapshots_of(two, "p2", "engine-1")
            admitted = await one.admit(ACME)
            ended: list[ServingError] = []
            admitted.running.on_abort(ended.append)
            assert not second.abort_own(admitted.request_id)
            await two.live.aborts.request("p1", admitted.request_id)
            await second.publish()
            assert ended == []
            await first.publish()
            assert [error.code for error in ended] == [ErrorCode.REQUEST_ABORTED]

    run(scenario)


def test_a_deletion_is_drained_only_once_every_engine_has_unloaded_the_content(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.control.requests.draining.POLL_OTHERS_EVERY_S", 0.01)

    async def keep_telling(node: Node) -> None:
        while True:
            node.clock.now += 1
            await node.snapshots.publish()
            await asyncio.sleep(0.005)

    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            telling = [asyncio.create_task(keep_telling(node)) for node in (one, two)]
            for name in ("sql", "poet"):
                digest = await one.publish(name, name)
                # A server would unload content of a document that it has not heard of yet.
                await eventually(partial(two.residency.is_wanted, digest))
                for node in (one, two):
                    await node.residency.load(digest)
            assert (await one.adapters.delete(ACME, "r", "sql", drain_s=0)).drained
            assert len(two.engine.known) == 1
            # The other engine is told to unload it, but does not acknowledge.
            monkeypatch.setattr("loraserve.control.requests.draining.ACK_WAIT_S", 0.5)
            two.engine.may_unload.clear()
            assert not (await one.adapters.delete(ACME, "r", "poet", drain_s=0)).drained
            assert (len(one.engine.known), len(two.engine.known)) == (0, 1)
            two.engine.may_unload.set()
            await eventually(lambda: two.engine.known == {})
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)

    run(scenario)


def test_engine_state_depends_on_progress_draining_and_errors(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            runtime = node.runtime
            assert engine_state(runtime) is EngineState.READY
            node.engine.last_progress_s -= runtime.settings.progress_timeout_s + 1
            assert engine_state(runtime) is EngineState.READY
            node.engine.stats = EngineStats(num_running=1)
            assert engine_state(runtime) is EngineState.STALLED
            node.engine.longest_step_s = runtime.settings.progress_timeout_s  # As with a large model on a CPU.
            assert engine_state(runtime) is EngineState.READY
            node.engine.last_progress_s -= LONG_STEPS * node.engine.longest_step_s
            assert engine_state(runtime) is EngineState.STALLED
            runtime.lifecycle.begin_drain()
            assert engine_state(runtime) is EngineState.DRAINING
            node.engine.error = "gone"
            assert engine_state(runtime) is EngineState.DEAD

    run(scenario)

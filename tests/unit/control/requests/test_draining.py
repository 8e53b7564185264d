import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraserve.control.adapters.queries import AdapterState
from loraserve.live.admission_records import AdmitCall, AdmitReply
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, DONE, Node, eventually, run, two_nodes

__all__ = ["valkey"]


@contextlib.asynccontextmanager
async def two_telling(data_dir: Path, url: str) -> AsyncIterator[tuple[Node, Node]]:
    """Two servers that keep reporting what they run."""

    async def keep_telling(node: Node) -> None:
        while True:
            node.clock.now += 0.001
            await node.snapshots.publish()
            await asyncio.sleep(0.005)

    async with two_nodes(data_dir, url) as (one, two):
        telling = [asyncio.create_task(keep_telling(node)) for node in (one, two)]
        try:
            yield one, two
        finally:
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)


def test_deletion_waits_for_another_servers_requests_for_the_adapter_but_not_for_its_content(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.control.requests.draining.POLL_OTHERS_EVERY_S", 0.01)

    async def scenario() -> None:
        async with two_telling(tmp_path / "data", valkey.url) as (one, two):
            digest = await one.publish("sql", "the same")
            assert await one.publish("copy", "the same") == digest
            admitted = await two.admit(ACME, "sql")
            beside = await two.admit(ACME, "copy")
            deletion = asyncio.create_task(one.adapters.delete(ACME, "r", "sql", drain_s=60))
            # It receives several reports that the request is still running.
            told = two.clock.now + 0.1
            await eventually(lambda: two.clock.now >= told)
            assert not deletion.done()
            await two.admission.finish(admitted, DONE)
            # Requests for the other adapter are no reason to wait.
            assert (await deletion).drained
            assert beside.running.ended_with is None
            assert one.adapters.state_of((await deletion).document) is AdapterState.DELETED

    run(scenario)


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("of_tenant", [False, True])
def test_deletion_waits_for_a_request_that_redis_has_admitted_though_its_server_does_not_know_it_yet(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool, of_tenant: bool
) -> None:
    monkeypatch.setattr("loraserve.control.requests.draining.POLL_OTHERS_EVERY_S", 0.01)

    async def scenario() -> None:
        async with two_telling(tmp_path / "data", valkey.url) as (one, two):
            await one.publish("sql", "one")
            server = two if is_elsewhere else one
            was_admitted, may_know = asyncio.Event(), asyncio.Event()
            admit = server.live.admission.admit

            async def admit_slowly(call: AdmitCall) -> AdmitReply:
                reply = await admit(call)
                was_admitted.set()
                await may_know.wait()
                return reply

            monkeypatch.setattr(server.live.admission, "admit", admit_slowly)
            admission = asyncio.create_task(server.admit(ACME, "sql"))
            await was_admitted.wait()
            deletion = asyncio.create_task(
                one.tenant_deletion.delete(ADMIN, "r", "acme")
                if of_tenant
                else one.adapters.delete(ACME, "r", "sql", drain_s=60)
            )
            told = two.clock.now + 0.1
            await eventually(lambda: two.clock.now >= told)
            assert not deletion.done()
            may_know.set()
            await server.admission.finish(await admission, DONE)
            assert (await deletion).drained

    run(scenario)


def test_deletion_stops_waiting_for_another_servers_requests_at_the_deadline(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.control.requests.draining.POLL_OTHERS_EVERY_S", 0.01)
    monkeypatch.setattr("loraserve.control.requests.draining.ACK_WAIT_S", 0.1)

    async def scenario() -> None:
        async with two_telling(tmp_path / "data", valkey.url) as (one, two):
            await one.publish("sql", "one")
            await one.publish("copy", "one")
            await two.admit(ACME, "sql")
            assert not (await one.adapters.delete(ACME, "r", "sql", drain_s=0.01)).drained

    run(scenario)

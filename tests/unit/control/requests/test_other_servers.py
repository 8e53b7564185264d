from pathlib import Path

from loraserve.control.requests.other_servers import OtherServers
from tests.support.valkey import Valkey, valkey
from tests.unit.control.monitoring.test_live_views import snapshots_of
from tests.unit.control.nodes import ACME, DONE, run, two_nodes

__all__ = ["valkey"]


def test_other_servers_know_which_contents_an_engine_has(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            digest = await one.publish("sql", "one")
            telling = snapshots_of(one, "p1")
            first, second = OtherServers(one.live, "p1"), OtherServers(two.live, "p2")
            async with one.residency.hold(digest):
                await telling.publish()
                assert await second.any_has({digest}, {})
                assert not await second.any_has({"0" * 64}, {})
                # A server's own report does not count.
                assert not await first.any_has({digest}, {})
                # An earlier report may be outdated; only the next one counts.
                before = await second.last_report_times()
                assert await second.any_has({"0" * 64}, before)
                await telling.publish()
                assert not await second.any_has({"0" * 64}, before)
            valkey.kill()
            assert await second.any_has({digest}, {})

    run(scenario)


def test_other_servers_know_which_adapters_a_server_runs_and_for_which_tenants(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path / "data", valkey.url) as (one, two):
            await one.publish("sql", "one")
            telling = snapshots_of(one, "p1")
            first, second = OtherServers(one.live, "p1"), OtherServers(two.live, "p2")
            admitted = await one.admit(ACME, "sql")
            await telling.publish()
            assert await second.any_runs("acme/sql", {})
            assert not await second.any_runs("globex/sql", {})
            assert await second.any_serves("acme", {})
            assert not await second.any_serves("globex", {})
            assert not await first.any_serves("acme", {})
            assert not await first.any_runs("acme/sql", {})
            before = await second.last_report_times()
            await one.admission.finish(admitted, DONE)
            assert await second.any_runs("acme/sql", before)
            assert await second.any_serves("acme", before)
            await telling.publish()
            assert not await second.any_runs("acme/sql", before)
            assert not await second.any_serves("acme", before)
            valkey.kill()
            assert await second.any_runs("globex/sql", {})

    run(scenario)

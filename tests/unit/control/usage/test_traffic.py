import time
from pathlib import Path

from loraserve.control.tenancy.principal import server_principal
from loraserve.control.usage.outcome import Outcome
from loraserve.control.usage.request_totals import RequestTotals
from loraserve.control.usage.shipping import UsageShipping
from loraserve.control.usage.traffic import UsageTraffic
from loraserve.live.requests import EndState
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, Node, run, running_node, with_tenants
from tests.unit.control.usage.test_shipping import NOW, line

__all__ = ["valkey"]

GLOBEX = server_principal("globex", "cli")
SHARED = server_principal("shared", "cli")


async def traffic(node: Node, *lines, totals: RequestTotals | None = None) -> UsageTraffic:
    await with_tenants(node)
    for one in lines:
        node.usage_log.append(one)
    await UsageShipping(node.data_dir, node.live).ship()
    return UsageTraffic(node.live, node.catalog, totals or RequestTotals())


def test_traffic_counts_the_requests_of_a_day_by_adapter(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            found = await traffic(
                node,
                line(1),
                line(2, at=NOW - 20 * 3600, ttft_ms=900.0),
                line(3, at=NOW - 30 * 3600),
                line(4, adapter_tenant="shared"),
                line(5, tenant="globex", adapter_tenant="globex"),
            )
            of_acme = await found.of(ACME)
            assert of_acme["acme", "sql"].num_requests == 2
            assert of_acme["shared", "sql"].num_requests == 1
            slowest = of_acme["acme", "sql"].ttft_p95_ms
            assert slowest is not None
            assert slowest > 500
            assert of_acme["acme", "sql"].last_used_at == NOW // 3600 * 3600
            assert await found.of(GLOBEX) == {("globex", "sql"): of_acme["shared", "sql"]}

    run(scenario)


def test_operators_of_the_shared_adapters_see_the_requests_of_all_tenants(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            lines = [line(n, tenant=tenant, adapter_tenant="shared") for n, tenant in enumerate(("acme", "globex"))]
            found = await traffic(node, *lines, line(9))
            assert {key: of.num_requests for key, of in (await found.of(SHARED)).items()} == {("shared", "sql"): 2}

    run(scenario)


def test_the_last_use_is_exact_if_it_was_on_this_server(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            totals = RequestTotals()
            now = time.time()
            totals.count("acme", ("acme", "sql"), Outcome(EndState.COMPLETED, "stop", 1, 0, 1), now)
            found = await traffic(node, line(1), totals=totals)
            assert (await found.of(ACME))["acme", "sql"].last_used_at == now

    run(scenario)

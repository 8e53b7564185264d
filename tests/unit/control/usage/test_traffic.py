import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from loraserve.control.tenancy.principal import server_principal
from loraserve.control.usage import traffic as traffic_module
from loraserve.control.usage.outcome import Outcome
from loraserve.control.usage.request_totals import RequestTotals
from loraserve.control.usage.shipping import UsageShipping
from loraserve.control.usage.traffic import NO_TRAFFIC, UsageTraffic
from loraserve.live.requests import EndState
from loraserve.live.usage import HOUR_S, UsageSum
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
    shipping = UsageShipping(node.data_dir, node.live)
    await shipping.ship()
    return UsageTraffic(node.live, node.catalog, totals or RequestTotals(), shipping)


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


def test_hours_that_are_over_are_read_once_from_each_redis(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            node.usage_log.append(line(1, at=NOW - 5 * HOUR_S))
            shipping = UsageShipping(node.data_dir, node.live)
            found = UsageTraffic(node.live, node.catalog, RequestTotals(), shipping)
            hours, spans = node.live.usage.hours, []

            def counted(tenant: str, start: float, end: float, *more: str) -> AsyncIterator[list[UsageSum]]:
                spans.append((end - start) // HOUR_S)
                return hours(tenant, start, end, *more)

            monkeypatch.setattr(node.live.usage, "hours", counted)

            async def num_requests() -> int:
                return (await found.of(ACME)).get(("acme", "sql"), NO_TRAFFIC).num_requests

            assert await num_requests() == 0
            await shipping.ship()
            assert await num_requests() == 1
            node.usage_log.append(line(2))
            await shipping.ship()
            assert await num_requests() == 2
            assert spans == [22, 2, 22, 2, 2], "hours that are over are kept once all logs are in Redis"
            valkey.command("FLUSHALL")
            assert not await node.live.view.is_current()
            await node.catalog.synchronise()
            await shipping.ship()
            assert await num_requests() == 2
            assert spans[5:] == [22, 2]

    with monkeypatch.context() as patched:
        patched.setattr(traffic_module, "KEEP_S", 0.0)
        patched.setattr(traffic_module, "time", SimpleNamespace(time=lambda: NOW))
        run(scenario)

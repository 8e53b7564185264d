import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.control.usage import reports as reports_module
from loraserve.control.usage.metrics import Metric
from loraserve.control.usage.reports import (
    GroupBy,
    Interval,
    UsageAnswer,
    UsageQuestion,
    UsageReports,
    UsageTotals,
    as_csv,
)
from loraserve.control.usage.shipping import UsageShipping, adapter_of_counter, counter_of
from loraserve.live.usage import UsageSum
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import Role
from loraserve.store.usage_log import BilledOutcome, UsageLine, UsageLog
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ACME, ADMIN, Node, run, running_node, with_tenants

__all__ = ["valkey"]

NOW = time.time()
DAY = UsageQuestion(NOW - 86_400, NOW + 60)
EVERYBODY = server_principal("default", "cli")


def line(number: int = 1, **changes: object) -> UsageLine:
    fields: dict[str, object] = {
        "request_id": f"r{number}",
        "at": NOW,
        "tenant": "acme",
        "key_id": "k1",
        "adapter": "sql",
        "adapter_tenant": "acme",
        "version": 1,
        "digest": "d",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 3,
        "outcome": BilledOutcome.STOP,
        "ttft_ms": 20.0,
        "duration_ms": 30.0,
    }
    return UsageLine(**(fields | changes))  # pyright: ignore[reportArgumentType]


def reports(node: Node) -> UsageReports:
    return UsageReports(node.live, node.catalog, UsageShipping(node.data_dir, node.live))


def counts(row: UsageTotals) -> tuple[int, ...]:
    return tuple(row.count(metric) for metric in Metric)


def append(node: Node, *lines: UsageLine) -> None:
    for one in lines:
        node.usage_log.append(one)


def test_every_usage_line_counts_once_even_if_several_servers_ship_it(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            ships = [UsageShipping(node.data_dir, node.live) for _ in range(2)]
            for number in range(5):
                append(node, line(number), line(number, outcome=BilledOutcome.ERROR, ttft_ms=None))
                for shipping in ships:
                    await shipping.ship()
                    await shipping.ship()
                    assert shipping.is_complete
            (row,) = (await reports(node).answer(ACME, DAY)).rows
            assert counts(row) == (10, 5, 100, 40, 30)
            assert sum(row.ttft.values()) == 5

    run(scenario)


def test_an_answer_is_not_complete_if_redis_was_emptied_and_accepted_again_meanwhile(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            append(node, line())
            usage = reports(node)
            before = await usage.answer(ACME, DAY)
            assert len(before.rows) == 1
            assert before.is_complete
            hours = node.live.usage.hours

            async def emptied(*asked: Any) -> AsyncIterator[list[UsageSum]]:
                valkey.command("FLUSHALL")
                assert not await node.live.view.is_current()
                await node.catalog.synchronise()
                async for page in hours(*asked):
                    yield page

            with monkeypatch.context() as patched:
                patched.setattr(node.live.usage, "hours", emptied)
                assert await usage.answer(ACME, DAY) == UsageAnswer([], is_complete=False)
            assert await usage.answer(ACME, DAY) == before

    run(scenario)


def test_all_usage_is_shipped_again_after_redis_was_emptied(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            shipping = UsageShipping(node.data_dir, node.live)
            append(node, line(1), line(2, at=NOW - 86_400))
            await shipping.ship()
            valkey.command("FLUSHALL")
            assert not await node.live.view.is_current()
            await shipping.ship()
            assert not shipping.is_complete
            await node.catalog.synchronise()
            append(node, line(3))
            await shipping.ship()
            assert shipping.is_complete
            question = UsageQuestion(NOW - 3 * 86_400, NOW + 60, Interval.DAY)
            rows = (await UsageReports(node.live, node.catalog, shipping).answer(ACME, question)).rows
            assert [row.count(Metric.REQUESTS) for row in rows] == [1, 2]

    run(scenario)


def test_a_deleted_tenant_is_reported_only_for_periods_in_which_it_existed(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            append(node, line(1, at=NOW - 3 * 86_400), line(2, tenant="globex", adapter_tenant="globex"))
            node.clock.now = NOW - 2 * 86_400
            await node.tenant_deletion.delete(ADMIN, "r", "acme")
            by_tenant = frozenset({GroupBy.TENANT})
            for start, tenants in ((NOW - 4 * 86_400, ["acme", "globex"]), (NOW - 3600, ["globex"])):
                question = UsageQuestion(start, NOW + 60, group_by=by_tenant, every_tenant=True)
                assert [row.tenant for row in (await reports(node).answer(EVERYBODY, question)).rows] == tenants

    run(scenario)


def test_the_log_of_a_process_that_died_is_shipped(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            dead = UsageLog(node.data_dir, "dead")
            dead.append(line(1))
            dead.close()
            (path,) = node.data_dir.glob("usage/*/dead.jsonl")
            with path.open("ab") as log:
                log.write(b'{"torn')
            (row,) = (await reports(node).answer(ACME, DAY)).rows
            assert row.count(Metric.REQUESTS) == 1

    run(scenario)


def test_usage_rows_are_grouped_and_filtered(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            append(
                node,
                line(1),
                line(2, version=2, key_id="k2"),
                line(3, adapter=None, adapter_tenant=None, version=None),
                line(4, adapter_tenant="shared"),
            )
            usage = reports(node)

            async def rows(*groups: GroupBy, **only: str) -> list[tuple[object, ...]]:
                question = UsageQuestion(NOW - 60, NOW + 60, Interval.TOTAL, frozenset(groups), **only)
                found = (await usage.answer(ACME, question)).rows
                return [(row.key_id, row.adapter, row.version, row.count(Metric.REQUESTS)) for row in found]

            assert await rows() == [(None, None, None, 4)]
            assert await rows(GroupBy.KEY) == [("k1", None, None, 3), ("k2", None, None, 1)]
            assert await rows(GroupBy.ADAPTER, GroupBy.VERSION) == [
                (None, "", None, 1),
                (None, "shared/sql", 1, 1),
                (None, "sql", 1, 1),
                (None, "sql", 2, 1),
            ]
            assert await rows(adapter="") == [(None, None, None, 1)]
            assert await rows(adapter="sql") == [(None, None, None, 3)]
            assert await rows(adapter="shared/sql") == [(None, None, None, 1)]
            assert await rows(key_id="k2") == [(None, None, None, 1)]

    run(scenario)


def test_redis_sends_only_counters_of_the_key_and_adapter_that_are_asked_for(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            append(node, *(line(n, adapter=f"a{n}", key_id=f"k{n % 2}", ttft_ms=None) for n in range(20)))
            append(node, line(20, adapter=None, adapter_tenant=None, version=None))
            usage, hours = reports(node), node.live.usage.hours
            sent: set[tuple[str, str]] = set()

            async def seen(*asked: Any) -> AsyncIterator[list[UsageSum]]:
                async for page in hours(*asked):
                    sent.update((total.key_id, total.adapter) for total in page)
                    yield page

            monkeypatch.setattr(node.live.usage, "hours", seen)
            for only, expected in (
                ({"adapter": "a7"}, {("k1", "a7")}),
                ({"adapter": "a[1-9]"}, set()),
                ({"adapter": ""}, {("k1", "-")}),
                ({"adapter": "a7", "key_id": "k0"}, set()),
                ({"key_id": "k0"}, {("k0", f"a{n}") for n in range(0, 20, 2)}),
            ):
                sent.clear()
                question = UsageQuestion(NOW - 60, NOW + 60, Interval.TOTAL, **only)
                rows = (await usage.answer(ACME, question)).rows
                assert sent == expected
                assert sum(row.count(Metric.REQUESTS) for row in rows) == len(expected)

    run(scenario)


def test_an_answer_of_too_many_rows_is_refused(valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            append(node, *(line(n, adapter=f"a{n % 2}", at=NOW - n * 3600) for n in range(4)))
            usage = reports(node)
            monkeypatch.setattr(reports_module, "MAX_ROWS", 3)
            groups = frozenset({GroupBy.ADAPTER, GroupBy.KEY})
            assert len((await usage.answer(ACME, UsageQuestion(NOW - 86_400, NOW + 60, group_by=groups))).rows) == 2
            with pytest.raises(ServingError) as refused:
                await usage.answer(ACME, UsageQuestion(NOW - 86_400, NOW + 60, Interval.HOUR, groups))
            assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_VALUE, "group_by")
            assert "is key,adapter, with interval=hour: that makes more than 3 rows" in str(refused.value)

    run(scenario)


def test_a_total_that_starts_before_the_kept_hours_is_made_of_days(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            append(node, *(line(days, at=NOW - days * 86_400) for days in (0, 5, 9, 35)))
            usage = reports(node)

            async def num_requests(first: int, last: int) -> int:
                """From `first` days ago to `last` days ago."""
                found = (await usage.answer(ACME, UsageQuestion(NOW - first * 86_400, NOW - last * 86_400 + 60))).rows
                return sum(row.count(Metric.REQUESTS) for row in found)

            assert await num_requests(40, 33) == 1
            assert await num_requests(10, 3) == 2
            assert await num_requests(7, 0) == 2

    run(scenario)


def test_a_tenant_sees_usage_of_its_own_requests_only(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            append(node, line(1), line(2, tenant="globex", adapter_tenant="shared"), line(3, adapter="secret"))
            usage = reports(node)
            viewer = Principal("k", Role.VIEWER, "acme", "acme", "k")
            asked = UsageQuestion(NOW - 60, NOW + 60, group_by=frozenset({GroupBy.TENANT}), every_tenant=True)
            assert [(row.tenant, row.count(Metric.REQUESTS)) for row in (await usage.answer(viewer, asked)).rows] == [
                ("acme", 2)
            ]
            rows = (await usage.answer(EVERYBODY, asked)).rows
            assert [(row.tenant, row.count(Metric.REQUESTS)) for row in rows] == [("acme", 2), ("globex", 1)]
            # Acting for `shared`: only requests for its adapters, whoever sent them.
            rows = (await usage.answer(server_principal("shared", "cli"), DAY)).rows
            assert [row.count(Metric.REQUESTS) for row in rows] == [1]
            listed = Principal("k", Role.VIEWER, "acme", "acme", "k", adapters=frozenset({"sql"}))
            assert [row.count(Metric.REQUESTS) for row in (await usage.answer(listed, DAY)).rows] == [1]

    run(scenario)


@pytest.mark.parametrize(
    ("start", "end", "interval", "param"),
    [
        (float("nan"), NOW, Interval.TOTAL, "from"),
        (NOW, float("inf"), Interval.TOTAL, "to"),
        (-1.0, NOW, Interval.DAY, "from"),
        (NOW, NOW, Interval.TOTAL, "to"),
        (NOW - 9 * 86_400, NOW - 8 * 86_400, Interval.HOUR, "from"),
        (NOW, NOW + 9 * 86_400, Interval.HOUR, "to"),
        (NOW - 402 * 86_400, NOW, Interval.DAY, "from"),
        (NOW - 402 * 86_400, NOW - 401 * 86_400, Interval.TOTAL, "from"),
        (NOW, NOW + 401 * 86_400, Interval.TOTAL, "to"),
    ],
    ids=[
        *("no number", "infinite", "before 1970", "nothing", "hours that are gone", "too many hours"),
        *("days that are gone", "a total of days that are gone", "too many days"),
    ],
)
def test_periods_that_cannot_be_answered_are_refused(
    valkey: Valkey, tmp_path: Path, start: float, end: float, interval: Interval, param: str
) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            with pytest.raises(ServingError) as refused:
                await reports(node).answer(ACME, UsageQuestion(start, end, interval))
            assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_VALUE, param)

    run(scenario)


def test_counters_name_the_owner_of_shared_adapters() -> None:
    assert adapter_of_counter("acme", counter_of("sql", "acme")) == ("acme", "sql")
    assert adapter_of_counter("acme", counter_of("sql", "shared")) == ("shared", "sql")
    assert adapter_of_counter("acme", counter_of(None, None)) == ("acme", "")


def test_usage_csv_has_a_column_for_each_field() -> None:
    row = UsageTotals(start=3600.0, tenant="acme")
    row.counts[Metric.REQUESTS.value] += 2
    header, cells = (text.split(",") for text in as_csv([row]).splitlines())
    assert dict(zip(header, cells, strict=True)) == {
        "start": "3600",
        "tenant": "acme",
        "key_id": "",
        "adapter": "",
        "version": "",
        "requests": "2",
        "errors": "0",
        "prompt_tokens": "0",
        "cached_tokens": "0",
        "output_tokens": "0",
        "ttft_p50_ms": "",
        "ttft_p95_ms": "",
    }

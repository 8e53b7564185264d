import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from loraserve.live.key_names import usage_glob, usage_metrics_glob
from loraserve.live.live_store import LiveStore
from loraserve.live.usage import DAY_S, UsageApplied, UsageDelta, UsageElsewhere, UsageSum, ViewMissing
from tests.support.live_documents import build_view
from tests.unit.live.conftest import RunCheck

NOW = time.time()


def delta(amount: int = 5, *, metric: str = "output_tokens", at: float = NOW, tenant: str = "acme") -> UsageDelta:
    return UsageDelta(tenant=tenant, at=at, key_id="k1", adapter="acme/poet", version=2, metric=metric, amount=amount)


async def all_of(pages: AsyncIterator[list[UsageSum]]) -> list[UsageSum]:
    return [found async for page in pages for found in page]


async def total(store: LiveStore, metric: str = "output_tokens", tenant: str = "acme") -> int:
    sums = await all_of(store.usage.days(tenant, NOW - 500 * DAY_S, NOW + DAY_S))
    return sum(found.amount for found in sums if found.metric == metric)


def test_a_batch_that_is_applied_several_times_is_counted_once(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        assert await store.usage.apply("a.jsonl", 0, 120, [delta(5), delta(7)]) == UsageApplied(offset=120)
        for _ in range(3):
            reply = await store.usage.apply("a.jsonl", 0, 120, [delta(5), delta(7)])
            assert reply == UsageElsewhere(offset=120)
        assert await store.usage.apply("a.jsonl", 120, 240, [delta(1)]) == UsageApplied(offset=240)
        assert await total(store) == 13
        assert await store.usage.offset("a.jsonl") == 240

    on_any_server(check)


def test_a_batch_after_a_gap_in_a_log_is_not_applied(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        assert await store.usage.apply("a.jsonl", 60, 120, [delta()]) == UsageElsewhere(offset=0)
        assert await total(store) == 0

    on_any_server(check)


def test_logs_tenants_and_metrics_are_counted_separately(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        await store.usage.apply("a.jsonl", 0, 10, [delta(3), delta(4, metric="prompt_tokens")])
        await store.usage.apply("b.jsonl", 0, 20, [delta(8), delta(100, tenant="zeta")])
        assert (await total(store), await total(store, "prompt_tokens"), await total(store, tenant="zeta")) == (
            11,
            4,
            100,
        )

    on_any_server(check)


def test_hourly_sums_name_key_adapter_version_metric_and_hour(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        hour = NOW // 3600 * 3600
        await store.usage.apply("a.jsonl", 0, 10, [delta(3), delta(4, at=hour - 1)])
        sums = await all_of(store.usage.hours("acme", hour - 3600, hour + 3600))
        expected = {"key_id": "k1", "adapter": "acme/poet", "version": 2, "metric": "output_tokens"}
        assert sums == [
            UsageSum(start=hour - 3600, amount=4, **expected),
            UsageSum(start=hour, amount=3, **expected),
        ]

    on_any_server(check)


def test_usage_older_than_a_counters_lifetime_is_counted_only_in_longer_lived_counters(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        old = NOW - 20 * DAY_S
        await store.usage.apply("a.jsonl", 0, 10, [delta(3, at=old), delta(9, at=NOW - 500 * DAY_S)])
        assert await all_of(store.usage.hours("acme", old - DAY_S, NOW)) == []
        assert await total(store) == 3
        assert await store.usage.offset("a.jsonl") == 10

    on_any_server(check)


def test_an_emptied_redis_counts_no_usage_before_its_view_is_built(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        assert await store.usage.apply("a.jsonl", 0, 10, [delta()]) == ViewMissing()
        await build_view(store)
        assert await store.usage.apply("a.jsonl", 0, 10, [delta()]) == UsageApplied(offset=10)

    on_any_server(check)


def test_a_batch_over_many_counters_is_applied_in_one_call(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        deltas = [delta(1, metric=f"m{index}", tenant=f"t{index % 50}") for index in range(5000)]
        assert await store.usage.apply("a.jsonl", 0, 10, deltas) == UsageApplied(offset=10)
        assert await total(store, "m4999", "t49") == 1

    on_any_server(check)


async def count_adapters(store: LiveStore, num_adapters: int = 10_000) -> None:
    """One request to each of a0, a1, ..., in this hour."""
    for at in range(0, num_adapters, 2000):
        deltas = [
            UsageDelta(tenant="acme", at=NOW, key_id="k", adapter=f"a{n}", version=1, metric="n", amount=1)
            for n in range(at, at + 2000)
        ]
        assert await store.usage.apply("a", at, at + 2000, deltas) == UsageApplied(offset=at + 2000)


def test_an_hour_of_ten_thousand_counters_is_read_completely_while_other_tasks_run(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        await count_adapters(store)
        num_turns, turns_before = 0, []

        async def other() -> None:
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        task = asyncio.create_task(other())
        pages: list[list[UsageSum]] = []
        async for page in store.usage.hours("acme", NOW, NOW + 1):
            pages.append(page)
            turns_before.append(num_turns)
        task.cancel()
        assert sum(map(len, pages)) == 10_000
        assert len({found.adapter for page in pages for found in page}) == 10_000
        assert max(map(len, pages)) < 1200
        assert turns_before == sorted(set(turns_before)), "a turn before every page"

    on_any_server(check)


def test_the_counters_of_one_adapter_are_found_without_reading_the_others(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        await count_adapters(store)
        pages = [page async for page in store.usage.hours("acme", NOW, NOW + 1, usage_glob(adapter="a77"))]
        assert [found.adapter for page in pages for found in page] == ["a77"]
        assert len(pages) <= 4, "all 10,000 take more than 10 calls"

    on_any_server(check)


def test_globs_find_keys_and_adapters_by_their_whole_names(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        counters = [
            *(("k1", adapter) for adapter in ("sql", "shared/sql", "mysql", "sql2", "s[q]l", "-", "shared/s")),
            *(("k2", adapter) for adapter in ("sql", "n")),
        ]
        deltas = [
            UsageDelta(tenant="acme", at=NOW, key_id=key, adapter=adapter, version=1, metric=metric, amount=1)
            for key, adapter in counters
            for metric in ("n", "in", "ttft7")
        ]
        await store.usage.apply("a.jsonl", 0, 10, deltas)

        async def found(glob: str) -> set[tuple[str, str]]:
            sums = await all_of(store.usage.hours("acme", NOW, NOW + 1, glob))
            return {(found.key_id, found.adapter) for found in sums}

        assert await found(usage_glob()) == set(counters)
        assert await found(usage_glob(adapter="sql")) == {("k1", "sql"), ("k1", "shared/sql"), ("k2", "sql")}
        assert await found(usage_glob(adapter="shared/sql")) == {("k1", "shared/sql")}
        assert await found(usage_glob(adapter="-")) == {("k1", "-")}
        assert await found(usage_glob(adapter="s[q]l")) == {("k1", "s[q]l")}
        assert await found(usage_glob(key_id="k2")) == {("k2", "sql"), ("k2", "n")}
        assert await found(usage_glob(key_id="k2", adapter="sql")) == {("k2", "sql")}
        for text in ("*", "sq?", "k?", "s[a-z]l", "[k]1", "\\*"):
            assert await found(usage_glob(adapter=text)) == set()
            assert await found(usage_glob(key_id=text)) == set()
        sums = await all_of(store.usage.hours("acme", NOW, NOW + 1, usage_metrics_glob("nt")))
        assert {found.metric for found in sums} == {"n", "ttft7"}
        assert len(sums) == 2 * len(counters)

    on_any_server(check)


def test_small_hours_are_read_in_few_calls(on_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        await store.usage.apply("a.jsonl", 0, 10, [delta(at=NOW - hours * 3600) for hours in range(192)])
        pages = [page async for page in store.usage.hours("acme", NOW - 191 * 3600, NOW + 1)]
        assert sum(map(len, pages)) == 192
        assert len(pages) == 6

    on_server(check)


def test_a_counter_that_redis_returns_again_counts_once(on_server: RunCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(store: LiveStore) -> None:
        replies = [
            [0, b"96", [b"k,a,1,n 1 k,b,1,n 2"]],
            [1, b"48", [b"k,b,1,n 2 k,c,1,n 3", b"k,a,1,n 4"]],
            [1, b"0", [b"k,a,1,n 4 k,b,1,n 5"]],
        ]

        async def reply(_script: object, _keys: object, args: list[object]) -> list[object]:
            assert args[0] == (b"0", b"96", b"48")[3 - len(replies)]
            return replies.pop(0)

        monkeypatch.setattr(store.connection, "run_script", reply)
        sums = await all_of(store.usage.hours("acme", NOW // 3600 * 3600 - 1, NOW // 3600 * 3600 + 1))
        assert [(found.adapter, found.amount) for found in sums] == [("a", 1), ("b", 2), ("c", 3), ("a", 4), ("b", 5)]

    on_server(check)

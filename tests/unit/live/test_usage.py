import time

from loraserve.live.live_store import LiveStore
from loraserve.live.usage import DAY_S, UsageApplied, UsageDelta, UsageElsewhere, UsageSum, ViewMissing
from tests.support.live_documents import build_view
from tests.unit.live.conftest import RunCheck

NOW = time.time()


def delta(amount: int = 5, *, metric: str = "output_tokens", at: float = NOW, tenant: str = "acme") -> UsageDelta:
    return UsageDelta(tenant=tenant, at=at, key_id="k1", adapter="acme/poet", version=2, metric=metric, amount=amount)


async def total(store: LiveStore, metric: str = "output_tokens", tenant: str = "acme") -> int:
    sums = await store.usage.days(tenant, NOW - 500 * DAY_S, NOW + DAY_S)
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
        sums = await store.usage.hours("acme", hour - 3600, hour + 3600)
        expected = {"key_id": "k1", "adapter": "acme/poet", "version": 2, "metric": "output_tokens"}
        assert sums == [
            UsageSum(start=hour - 3600, amount=4, **expected),  # type: ignore[arg-type]
            UsageSum(start=hour, amount=3, **expected),  # type: ignore[arg-type]
        ]

    on_any_server(check)


def test_usage_older_than_a_counters_lifetime_is_counted_only_in_longer_lived_counters(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        old = NOW - 20 * DAY_S
        await store.usage.apply("a.jsonl", 0, 10, [delta(3, at=old), delta(9, at=NOW - 500 * DAY_S)])
        assert await store.usage.hours("acme", old - DAY_S, NOW) == []
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


def test_an_hour_of_ten_thousand_counters_is_read_completely(on_any_server: RunCheck) -> None:
    async def check(store: LiveStore) -> None:
        await build_view(store)
        for part in range(5):
            deltas = [
                UsageDelta(tenant="acme", at=NOW, key_id="k", adapter=f"a{n}", version=1, metric="n", amount=1)
                for n in range(part * 2000, part * 2000 + 2000)
            ]
            assert await store.usage.apply("a", part, part + 1, deltas) == UsageApplied(offset=part + 1)
        sums = await store.usage.hours("acme", NOW, NOW + 1)
        assert len(sums) == 10_000
        assert len({found.adapter for found in sums}) == 10_000

    on_any_server(check)

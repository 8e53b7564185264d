import time
from pathlib import Path

import pytest

from loraserve.control.monitoring.series_records import SeriesSample, one_after_another, side_by_side
from loraserve.control.monitoring.series_reports import STEPS, SeriesReports, Window
from loraserve.control.monitoring.series_sampling import SeriesSampling
from loraserve.control.tenancy.principal import Principal
from loraserve.control.usage.outcome import Outcome
from loraserve.control.usage.request_totals import RequestTotals
from loraserve.engine.request import EngineStats
from loraserve.live.requests import EndState
from loraserve.serving.telemetry.latency_histogram import bucket_of
from loraserve.store.engine_slots import EngineSlot
from loraserve.store.records import Role
from tests.support.valkey import Valkey, valkey
from tests.unit.control.nodes import ADMIN, Clock, Node, run, running_node, with_tenants

__all__ = ["valkey"]

VIEWER = Principal("k", Role.VIEWER, "acme", "acme", "k")
MINUTE = time.time() // 60 * 60 + 60
"""Streams are read by Redis's clock, so the samples are from about now."""
OUTCOME = Outcome(EndState.COMPLETED, "stop", 40, 10, 20, ttft_ms=100.0)


def sampling(node: Node, totals: RequestTotals, clock: Clock, engine: str) -> SeriesSampling:
    return SeriesSampling(node.live, node.runtime, totals, engine, clock=clock)


def test_charts_sum_all_engines_and_leave_gaps_without_samples(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            slots = [EngineSlot(node.data_dir), EngineSlot(node.data_dir)]
            clock = Clock(MINUTE)
            series = [sampling(node, RequestTotals(), clock, slot.engine) for slot in slots]
            node.engine.stats = EngineStats(
                num_running=2,
                num_blocks=100,
                num_free_blocks=70,
                num_cached_blocks=5,
                num_generation_tokens=50,
                num_adapter_loads=3,
                num_adapter_evictions=1,
            )
            clock.now += 10
            await series[0].sample()
            await series[1].sample()
            clock.now += 10
            await series[0].sample()
            chart = await SeriesReports(node.live, node.data_dir, clock=clock).chart(ADMIN, Window.QUARTER)
            assert chart.step_s == 10
            assert chart.at[-1] == MINUTE + 20
            assert len(chart.samples) == 90
            assert chart.samples[:-2] == [None] * 88
            both, one = chart.samples[-2:]
            assert both is not None
            assert one is not None
            assert (both.output_tokens, both.num_running, both.kv_used_blocks, both.kv_blocks) == (100, 4, 50, 200)
            assert (one.output_tokens, one.num_running, one.kv_blocks) == (0, 2, 100)
            assert (both.num_adapter_loads, both.num_adapter_evictions) == (6, 2)
            assert (one.num_adapter_loads, one.num_adapter_evictions) == (0, 0)
            for slot in slots:
                slot.release()

    run(scenario)


def test_six_ten_second_samples_make_a_minute(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            slot = EngineSlot(node.data_dir)
            clock, totals = Clock(MINUTE), RequestTotals()
            series = sampling(node, totals, clock, slot.engine)
            for number in range(6):
                totals.count("acme", None, OUTCOME, clock.now)
                node.engine.stats = EngineStats(
                    num_running=number, num_generation_tokens=20 * (number + 1), num_adapter_loads=2 * number
                )
                clock.now += 10
                await series.sample()
            chart = await SeriesReports(node.live, node.data_dir, clock=clock).chart(ADMIN, Window.DAY)
            assert (chart.step_s, len(chart.at)) == (60, 1440)
            sample = chart.samples[-1]
            assert sample is not None
            assert (sample.duration_s, sample.num_requests, sample.output_tokens) == (60, 6, 120)
            assert (sample.num_running, sample.num_adapter_loads) == (2.5, 10)
            slot.release()

    run(scenario)


def test_a_tenant_sees_its_own_requests_but_nothing_of_the_shared_engines(valkey: Valkey, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(tmp_path / "data", valkey.url, follow=False) as node:
            await with_tenants(node)
            slot = EngineSlot(node.data_dir)
            clock, totals = Clock(MINUTE), RequestTotals()
            series = sampling(node, totals, clock, slot.engine)
            totals.count("acme", None, OUTCOME, clock.now)
            for _ in range(3):
                totals.count("globex", None, OUTCOME, clock.now)
            node.engine.stats = EngineStats(num_running=9, num_generation_tokens=500, num_blocks=10)
            clock.now += 10
            await series.sample()
            chart = await SeriesReports(node.live, node.data_dir, clock=clock).chart(VIEWER, Window.HOUR)
            assert not chart.of_engines
            sample = chart.samples[-1]
            assert sample is not None
            assert (sample.num_requests, sample.prompt_tokens, sample.output_tokens) == (1, 40, 20)
            assert (sample.cache_queries, sample.cache_hits, sample.ttft) == (40, 10, {bucket_of(100.0): 1})
            assert (sample.num_running, sample.kv_blocks) == (0, 0)
            slot.release()

    run(scenario)


@pytest.mark.parametrize(("window", "seconds"), [(Window.QUARTER, 900), (Window.HOUR, 3600), (Window.DAY, 86_400)])
def test_windows_are_as_long_as_their_names_say(window: Window, seconds: int) -> None:
    interval, count = STEPS[window]
    assert interval * count == seconds


def test_samples_are_merged_without_averaging_percentiles() -> None:
    one = SeriesSample(duration_s=10, num_running=4, ttft={1: 2, 5: 1}, kv_blocks=10, kv_used_blocks=5)
    two = SeriesSample(duration_s=10, num_running=2, ttft={5: 3}, kv_blocks=10, kv_used_blocks=1)
    for merged, running, blocks in ((one_after_another([one, two]), 3, 10), (side_by_side([one, two]), 6, 20)):
        assert merged.ttft == {1: 2, 5: 4}
        assert (merged.num_running, merged.kv_blocks) == (running, blocks)

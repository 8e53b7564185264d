import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from loraserve.control.documents.outage import Outage
from loraserve.control.monitoring.server_metrics import ServerMetrics
from loraserve.control.usage.writer import UsageWriter
from loraserve.store.usage_log import UsageLog


def scraped(metrics: ServerMetrics) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return {sample.name: sample.value for family in registry.collect() for sample in family.samples}


async def until_measured(metrics: ServerMetrics) -> None:
    running = asyncio.create_task(metrics.run())
    while "loraserve_data_free_bytes" not in scraped(metrics):
        await asyncio.sleep(0.001)
    running.cancel()


def test_disk_metrics_of_the_data_directory_appear_once_they_were_measured(tmp_path: Path) -> None:
    metrics = ServerMetrics(tmp_path, Outage(), UsageWriter(UsageLog(tmp_path, "p1")))
    assert scraped(metrics) == {"loraserve_redis_up": 1, "loraserve_redis_full": 0, "loraserve_usage_lines_waiting": 0}
    asyncio.run(asyncio.wait_for(until_measured(metrics), 30))
    told = scraped(metrics)
    assert 0 < told["loraserve_data_free_bytes"] < told["loraserve_data_size_bytes"]


def test_disk_metrics_disappear_with_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.control.monitoring.server_metrics.MEASURE_EVERY_S", 0.001)
    folder = tmp_path / "mounted"
    folder.mkdir()
    metrics = ServerMetrics(folder, Outage(), UsageWriter(UsageLog(tmp_path, "p1")))

    async def take_away() -> None:
        running = asyncio.create_task(metrics.run())
        while "loraserve_data_free_bytes" not in scraped(metrics):
            await asyncio.sleep(0.001)
        folder.rmdir()
        while "loraserve_data_free_bytes" in scraped(metrics):
            await asyncio.sleep(0.001)
        running.cancel()

    asyncio.run(asyncio.wait_for(take_away(), 30))


def test_metrics_show_the_beginning_and_the_end_of_an_outage(tmp_path: Path) -> None:
    outage = Outage()
    metrics = ServerMetrics(tmp_path, outage, UsageWriter(UsageLog(tmp_path, "p1")))
    outage.failed("no answer")
    assert scraped(metrics)["loraserve_redis_up"] == 0
    outage.succeeded()
    assert scraped(metrics)["loraserve_redis_up"] == 1


def test_a_redis_that_is_gone_is_not_reported_as_full(tmp_path: Path) -> None:
    outage = Outage()
    metrics = ServerMetrics(tmp_path, outage, UsageWriter(UsageLog(tmp_path, "p1")))
    outage.is_full = True
    assert (scraped(metrics)["loraserve_redis_up"], scraped(metrics)["loraserve_redis_full"]) == (1, 1)
    outage.failed("no answer")
    assert (scraped(metrics)["loraserve_redis_up"], scraped(metrics)["loraserve_redis_full"]) == (0, 0)

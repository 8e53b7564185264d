"""Metrics of a server besides its engine and requests: Redis, the disk, usage that waits to be written."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from loraserve.control.documents.outage import Outage
from loraserve.control.usage.writer import UsageWriter
from loraserve.serving.telemetry.metrics import gauge

MEASURE_EVERY_S = 10.0


class ServerMetrics(Collector):
    """Called on the event loop. The disk is measured on another thread: a network file system may not answer."""

    def __init__(self, data_dir: Path, outage: Outage, usage: UsageWriter) -> None:
        self._data_dir = data_dir
        self._outage = outage
        self._usage = usage
        self._free_bytes: int | None = None
        self._size_bytes: int | None = None

    async def run(self) -> None:
        """Forever."""
        while True:
            try:
                disk = await asyncio.to_thread(shutil.disk_usage, self._data_dir)
            except OSError:
                self._free_bytes = self._size_bytes = None
            else:
                self._free_bytes, self._size_bytes = disk.free, disk.total
            await asyncio.sleep(MEASURE_EVERY_S)

    def collect(self) -> Iterator[Metric]:
        is_up = self._outage.began_s is None
        yield gauge("redis_up", "1 while Redis answers and admits requests.", is_up)
        full = "1 while Redis answers but accepts no new data: requests are served, but nothing can be changed."
        yield gauge("redis_full", full, is_up and self._outage.is_full)
        yield gauge("usage_lines_waiting", "Usage lines not written to disk yet.", self._usage.num_kept)
        if self._free_bytes is not None and self._size_bytes is not None:
            yield gauge("data_free_bytes", "Bytes free for the server on the data directory's disk.", self._free_bytes)
            yield gauge("data_size_bytes", "Size of the data directory's disk.", self._size_bytes)

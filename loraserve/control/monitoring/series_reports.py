"""Charts of the last 15 minutes to 24 hours, from the samples of all engines."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from loraserve.control.monitoring.series_records import SeriesSample, side_by_side
from loraserve.control.monitoring.series_sampling import tenant_series
from loraserve.control.tenancy.principal import Principal
from loraserve.control.unavailable import redis_required
from loraserve.live.live_store import LiveStore
from loraserve.live.series import Interval
from loraserve.store.engine_slots import engine_ids


class Window(StrEnum):
    QUARTER = "15m"
    HOUR = "1h"
    DAY = "24h"


STEPS: dict[Window, tuple[Interval, int]] = {
    Window.QUARTER: (Interval.FINE, 90),
    Window.HOUR: (Interval.FINE, 360),
    Window.DAY: (Interval.COARSE, 1440),
}


@dataclass(frozen=True, slots=True)
class Chart:
    """Equal steps, oldest first."""

    step_s: int
    at: list[float]
    """Ends of the steps; Unix time."""
    samples: list[SeriesSample | None]
    """None if nothing was measured."""
    of_engines: bool
    """False: covers one tenant's requests, and nothing that it shares with others."""


class SeriesReports:
    """Called on the event loop."""

    def __init__(self, live: LiveStore, data_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._live = live
        self._data_dir = data_dir
        self._clock = clock
        self._decoder = msgspec.json.Decoder(SeriesSample)

    async def chart(self, principal: Principal, window: Window) -> Chart:
        """Covers all engines if the principal may see every tenant, else the acting tenant's requests as they end.

        Raises `ServingError` (503).
        """
        interval, count = STEPS[window]
        end = math.floor(self._clock() / interval) * interval
        ends = [float(end - interval * (count - 1 - index)) for index in range(count)]
        engines = engine_ids(self._data_dir)
        of_engines = principal.is_any_tenant
        names = engines if of_engines else [tenant_series(engine, principal.acting_tenant) for engine in engines]
        steps: list[list[SeriesSample]] = [[] for _ in ends]
        for name in names:
            await self._fill(steps, name, interval, ends[0])
        return Chart(int(interval), ends, [side_by_side(found) if found else None for found in steps], of_engines)

    async def _fill(
        self, steps: Sequence[list[SeriesSample]], series: str, interval: Interval, first_end: float
    ) -> None:
        with redis_required():
            samples = await self._live.series.read(series, interval, first_end - interval)
        for sample in samples:
            index = round((sample.at - first_end) / interval)
            if 0 <= index < len(steps):
                steps[index].append(self._decoder.decode(sample.body))

"""Time series for charts, kept for about an hour (a sample every 10 s) and about a day (every 60 s)."""

from enum import IntEnum

import msgspec

from loraserve.live.connection import LiveConnection
from loraserve.live.key_names import KeyNames


class Interval(IntEnum):
    """Seconds."""

    FINE = 10
    COARSE = 60


NUM_SAMPLES = {Interval.FINE: 400, Interval.COARSE: 1500}


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    at: float
    """Unix time of the interval's end."""
    body: msgspec.Raw
    """JSON from the caller: gauges, counter deltas, histogram bucket deltas."""


class LiveSeries:
    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._decoder = msgspec.json.Decoder(Sample)

    async def append(self, interval: Interval, sample: Sample) -> None:
        """Raises LiveUnavailableError."""
        name = self._names.series(sample.engine, interval)
        body = msgspec.json.encode(sample)
        kept_s = NUM_SAMPLES[interval] * int(interval)
        await self._connection.call_many(
            [
                ["XADD", name, "MAXLEN", "~", NUM_SAMPLES[interval], "*", "v", body],
                ["EXPIRE", name, kept_s],
            ]
        )

    async def read(self, engine: str, interval: Interval, since: float) -> list[Sample]:
        """Samples appended at or after `since` (Unix time), oldest first. Raises LiveUnavailableError."""
        start = f"{max(0, int(since * 1000))}-0"
        entries = await self._connection.call("XRANGE", self._names.series(engine, interval), start, "+")
        return [self._decoder.decode(fields[1]) for _, fields in entries]

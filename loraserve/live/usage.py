"""Usage counters: every line of the usage logs is added exactly once, by whichever process reads it."""

import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from loraserve.live.connection import LiveConnection
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.key_names import ANY_COUNTER, KeyNames, usage_field
from loraserve.live.script_loader import load_script
from loraserve.live.server_link import Arg

HOUR_S = 3600
DAY_S = 24 * HOUR_S
HOURS_KEPT_S = 8 * DAY_S
DAYS_KEPT_S = 400 * DAY_S
HASHES_AT_ONCE = 32
COUNTERS_AT_ONCE = 500
"""Decoding 1000 takes 1.1 ms, during which the event loop is blocked."""


class UsageDelta(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    at: float
    """Unix time."""
    key_id: str
    adapter: str
    version: int
    metric: str
    amount: int


class UsageApplied(msgspec.Struct, frozen=True, kw_only=True):
    offset: int


class UsageElsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was added: the log is applied up to `offset`."""

    offset: int


class ViewMissing(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was added: Redis was emptied; compare documents with it first."""


UsageReply = UsageApplied | UsageElsewhere | ViewMissing


class UsageSum(msgspec.Struct, frozen=True, kw_only=True):
    start: float
    """Unix time of the hour or day (UTC)."""
    key_id: str
    adapter: str
    version: int
    metric: str
    amount: int


class LiveUsage:
    def __init__(self, connection: LiveConnection, names: KeyNames) -> None:
        self._connection = connection
        self._names = names
        self._apply = load_script("usage_apply")
        self._read = load_script("usage_read")

    async def offset(self, log: str) -> int:
        """Number of bytes of this log that are in the counters. Raises LiveUnavailableError."""
        return int(await self._connection.call("HGET", self._names.usage_offsets(), log) or 0)

    async def apply(self, log: str, start: int, end: int, deltas: list[UsageDelta]) -> UsageReply:
        """Adds the lines between two offsets of a log, but only if the log is applied exactly up to `start`.

        Raises LiveUnavailableError; repeating the call is then safe.
        """
        keys = [self._names.meta(), self._names.usage_offsets()]
        args: list[Arg] = [log, start, end]
        for bucket, fields in self._sums(deltas).items():
            keys.append(bucket.name)
            args += [bucket.expires_at, len(fields)]
            for field, amount in fields.items():
                args += [field, amount]
        reply_log, outcome, offset = await self._connection.run_script(self._apply, keys, args)
        if reply_log != log.encode():
            raise LiveUnavailableError(f"Redis answered about log {reply_log!r} instead of {log!r}")
        match outcome:
            case b"APPLIED":
                return UsageApplied(offset=offset)
            case b"OFFSET":
                return UsageElsewhere(offset=offset)
        return ViewMissing()

    def hours(self, tenant: str, start: float, end: float, glob: str = ANY_COUNTER) -> AsyncIterator[list[UsageSum]]:
        """Sums of the hours that overlap [start, end), in order, in pages; kept for 8 days.

        glob: of the counters' names. A page has at most about 1000 sums; other tasks run while the next one is read.
        Raises LiveUnavailableError.
        """
        starts = _starts(max(start, time.time() - HOURS_KEPT_S - HOUR_S), end, HOUR_S)
        return self._pages(starts, [self._names.usage_hour(tenant, _hour(at)) for at in starts], glob)

    def days(self, tenant: str, start: float, end: float, glob: str = ANY_COUNTER) -> AsyncIterator[list[UsageSum]]:
        """Like `hours`, by day (UTC); kept for 400 days. Raises LiveUnavailableError."""
        starts = _starts(max(start, time.time() - DAYS_KEPT_S - DAY_S), end, DAY_S)
        return self._pages(starts, [self._names.usage_day(tenant, _day(at)) for at in starts], glob)

    async def _pages(self, starts: list[int], names: list[str], glob: str) -> AsyncIterator[list[UsageSum]]:
        """Several calls, because counters of 10,000 adapters would exceed the time limit of one."""
        first, cursor = 0, b"0"
        seen: set[str] = set()
        """Of the hash that is being read: HSCAN may return a counter again if the hash grows between two calls."""
        while first < len(names):
            args = [cursor, glob, COUNTERS_AT_ONCE]
            group = names[first : first + HASHES_AT_ONCE]
            num_read, cursor, texts = await self._connection.run_script(self._read, group, args)
            page: list[UsageSum] = []
            for index, text in enumerate(texts):
                if index > 0:
                    seen.clear()
                words = text.decode().split()
                amounts = dict(zip(words[::2], words[1::2], strict=True))
                page += [_sum(starts[first + index], name, amounts[name]) for name in amounts if name not in seen]
                seen.update(amounts)
            if cursor == b"0":
                seen.clear()
            first += num_read
            yield page

    def _sums(self, deltas: list[UsageDelta]) -> dict["_Bucket", dict[str, int]]:
        sums: dict[_Bucket, dict[str, int]] = {}
        now = time.time()
        for delta in deltas:
            field = usage_field(delta.key_id, delta.adapter, delta.version, delta.metric)
            for bucket in (
                _Bucket(self._names.usage_hour(delta.tenant, _hour(delta.at)), hour_expires_at(delta.at)),
                _Bucket(self._names.usage_day(delta.tenant, _day(delta.at)), day_expires_at(delta.at)),
            ):
                if bucket.expires_at > now:
                    fields = sums.setdefault(bucket, {})
                    fields[field] = fields.get(field, 0) + delta.amount
        return sums


@dataclass(slots=True, frozen=True)
class _Bucket:
    name: str
    expires_at: int


def hour_expires_at(at: float) -> int:
    """Unix time when the counters of the hour that contains `at` expire; those of later hours expire no earlier."""
    return (int(at // HOUR_S) + 1) * HOUR_S + HOURS_KEPT_S


def day_expires_at(at: float) -> int:
    """Like `hour_expires_at`, for the day (UTC)."""
    return (int(at // DAY_S) + 1) * DAY_S + DAYS_KEPT_S


def _starts(start: float, end: float, length_s: int) -> list[int]:
    return list(range(int(start // length_s) * length_s, math.ceil(end), length_s))


def _hour(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y%m%d%H")


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y%m%d")


def _sum(at: int, field: str, amount: str) -> UsageSum:
    key_id, adapter, version, metric = field.split(",")
    return UsageSum(start=at, key_id=key_id, adapter=adapter, version=int(version), metric=metric, amount=int(amount))

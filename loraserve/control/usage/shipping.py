"""Adds the usage logs of all processes to the counters in Redis: each line once, whichever process ships it when."""

import asyncio
import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from loraserve.control.usage.metrics import Metric, ttft_metric
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.live.usage import UsageApplied, UsageDelta, UsageElsewhere
from loraserve.live.view import AcceptedView
from loraserve.store.records import SHARED_TENANT
from loraserve.store.usage_files import LogFile, list_logs, read_lines
from loraserve.store.usage_log import BilledOutcome, UsageLine

NO_KEY = "-"
"""Key id in counters for requests to an open server."""
BASE_MODEL = "-"
"""Adapter in counters for the base model; no adapter can have this name."""
SHARED_PREFIX = f"{SHARED_TENANT}/"
"""Precedes the names of shared adapters: a tenant may have its own adapter of the same name."""
ALL_EVERY_S = 60.0
"""Older days are checked this often; only yesterday's and today's logs grow."""
LINES_BYTES = 256 * 1024

logger = logging.getLogger(__name__)


class UsageShipping:
    """Called on the event loop. One per process; those of several processes do not conflict."""

    def __init__(self, data_dir: Path, live: LiveStore) -> None:
        self._data_dir = data_dir
        self._live = live
        self._applied: dict[str, int] = {}
        """Bytes of each log that Redis is known to have, as long as it is the same Redis."""
        self._of: AcceptedView | None = None
        """The Redis that `_applied` is about."""
        self._all_next_s = 0.0
        self.is_complete = False
        """Whether Redis had all of every log at the last check."""

    @property
    def complete_in(self) -> AcceptedView | None:
        """The Redis that `is_complete` is about; None if it is not."""
        return self._of if self.is_complete else None

    async def ship(self) -> None:
        """Add what is not in Redis yet, newest day first. Nothing is lost if Redis is gone: the next call continues."""
        accepted = self._live.view.accepted
        if accepted is None:
            self.is_complete = False
            return
        if accepted != self._of:
            # It may have been emptied, or be older than what was shipped to it.
            self._applied.clear()
            self._of = accepted
            self.is_complete = False
        is_all = not self.is_complete or time.monotonic() >= self._all_next_s
        try:
            for log in await asyncio.to_thread(list_logs, self._data_dir, None if is_all else _yesterday()):
                if not await self._ship(log):
                    self.is_complete = False
                    return
        except LiveUnavailableError:
            self.is_complete = False
            return
        if is_all and self._of == accepted:  # unless another call has begun again for another Redis
            self._all_next_s = time.monotonic() + ALL_EVERY_S
            self.is_complete = True

    async def _ship(self, log: LogFile) -> bool:
        """False: Redis was emptied."""
        offset = self._applied.get(log.name, -1)
        if offset >= log.size_bytes:
            return True
        if offset < 0:
            offset = await self._live.usage.offset(log.name)
        while offset < log.size_bytes:
            try:
                read = await asyncio.to_thread(read_lines, log.path, offset, LINES_BYTES)
            except FileNotFoundError:
                return True
            if read.num_damaged:
                logger.error("%d damaged lines in the usage log %s are skipped", read.num_damaged, log.name)
            if read.next_offset == offset:
                # The last line is still being written, or was torn by a crash.
                break
            match await self._live.usage.apply(log.name, offset, read.next_offset, deltas_of(read.lines)):
                case UsageApplied(offset=applied) | UsageElsewhere(offset=applied):
                    offset = applied
                case _:
                    return False
        self._applied[log.name] = offset
        return True


def counter_of(adapter: str | None, owner: str | None) -> str:
    """The adapter's part of a counter's name."""
    if adapter is None:
        return BASE_MODEL
    return SHARED_PREFIX + adapter if owner == SHARED_TENANT else adapter


def adapter_of_counter(tenant: str, counter: str) -> tuple[str, str]:
    """(owner, name) for a tenant's `counter_of`; the base model's name is empty."""
    if counter == BASE_MODEL:
        return tenant, ""
    shared = counter.removeprefix(SHARED_PREFIX)
    return (tenant, counter) if shared == counter else (SHARED_TENANT, shared)


def deltas_of(lines: Iterable[UsageLine]) -> list[UsageDelta]:
    return [delta for line in lines for delta in _deltas(line)]


def _yesterday() -> str:
    return (datetime.now(UTC) - timedelta(days=1)).strftime("%Y%m%d")


def _deltas(line: UsageLine) -> list[UsageDelta]:
    amounts = {
        Metric.REQUESTS: 1,
        Metric.ERRORS: int(line.outcome is BilledOutcome.ERROR),
        Metric.PROMPT_TOKENS: line.prompt_tokens,
        Metric.CACHED_TOKENS: line.cached_tokens,
        Metric.OUTPUT_TOKENS: line.output_tokens,
    }
    named = [(metric.value, amount) for metric, amount in amounts.items() if amount]
    if line.ttft_ms is not None:
        named.append((ttft_metric(line.ttft_ms), 1))
    return [
        UsageDelta(
            tenant=line.tenant,
            at=line.at,
            key_id=line.key_id or NO_KEY,
            adapter=counter_of(line.adapter, line.adapter_tenant),
            version=line.version or 0,
            metric=metric,
            amount=amount,
        )
        for metric, amount in named
    ]

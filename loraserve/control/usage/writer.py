"""Writes usage lines to disk. Lines that a full disk rejects are kept and tried again."""

import logging
from collections import deque

from loraserve.store.usage_log import UsageLine, UsageLog

MAX_KEPT = 10_000
"""Lines, about 10 MB."""
AT_ONCE = 1000
"""Lines; writing them takes about 10 ms, during which the event loop is blocked."""

logger = logging.getLogger(__name__)


class UsageWriter:
    """Called on the event loop; nothing here raises `OSError`. Dropped lines are reported in the server's log."""

    def __init__(self, log: UsageLog, *, max_kept: int = MAX_KEPT) -> None:
        self._log = log
        self._max_kept = max_kept
        self._kept: deque[UsageLine] = deque()

    @property
    def num_kept(self) -> int:
        """Lines that wait for the disk."""
        return len(self._kept)

    def write(self, line: UsageLine) -> None:
        """In the log when this returns, if the disk accepts it."""
        try:
            self._log.append(line)
        except OSError as error:
            if not self._kept:
                logger.error("usage cannot be written; retrying every second: %s", error)
            self._kept.append(line)
            if len(self._kept) > self._max_kept:
                _log_dropped(self._kept.popleft())

    def retry(self) -> None:
        """Call each second, before the log is synced."""
        if not self._kept:
            return
        for _ in range(min(AT_ONCE, len(self._kept))):
            try:
                self._log.append(self._kept[0])
            except OSError:
                return
            self._kept.popleft()
        if not self._kept:
            logger.warning("usage is being written again, including all lines that were waiting")

    def close(self) -> None:
        """Write as many lines as possible; the log itself stays open."""
        while self._kept:
            num_kept = len(self._kept)
            self.retry()
            if len(self._kept) == num_kept:
                break
        for line in self._kept:
            _log_dropped(line)
        self._kept.clear()


def _log_dropped(line: UsageLine) -> None:
    logger.error(
        "the usage of request %s could not be written and is not billed: "
        "tenant %s, key %s, %d prompt and %d output tokens",
        line.request_id,
        line.tenant,
        line.key_id,
        line.prompt_tokens,
        line.output_tokens,
    )

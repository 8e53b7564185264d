"""Usage lines on their way to the disk: what a full one does not take is kept and tried again."""

import logging
from collections import deque

from loraserve.store.usage_log import UsageLine, UsageLog

MAX_KEPT = 10_000
"""Lines, some 10 MB."""
AT_ONCE = 1000
"""Written in some 10 ms, for which everything else waits."""

logger = logging.getLogger(__name__)


class UsageWriter:
    """Called on the event loop; nothing here raises `OSError`. A line that is dropped is in the server's log."""

    def __init__(self, log: UsageLog, *, max_kept: int = MAX_KEPT) -> None:
        self._log = log
        self._max_kept = max_kept
        self._kept: deque[UsageLine] = deque()

    @property
    def num_kept(self) -> int:
        """Lines that wait for the disk."""
        return len(self._kept)

    def write(self, line: UsageLine) -> None:
        """To the log before this returns, if the disk takes it."""
        try:
            self._log.append(line)
        except OSError as error:
            if not self._kept:
                logger.error("usage cannot be written, which is tried again each second: %s", error)
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
            logger.warning("usage is written again, and all that was kept with it")

    def close(self) -> None:
        """Writes what it can; the log itself stays open."""
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

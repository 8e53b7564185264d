"""SIGINT and SIGTERM stop a command's requests, but not the processing of the answers so far."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SIGNAL_STATUS = 128
"""A process that was ended by a signal exits with this plus the signal's number."""


@dataclass(slots=True)
class Interruption:
    by: signal.Signals | None = None


@contextmanager
def ended_by_signals() -> Iterator[Interruption]:
    """The first signal cancels the await inside, and the task continues after the block; the next has its usual
    effect."""
    loop, task, interruption = asyncio.get_running_loop(), asyncio.current_task(), Interruption()
    assert task is not None

    def interrupt(number: signal.Signals) -> None:
        interruption.by = number
        restore()
        task.cancel()

    def restore() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield interruption
    except asyncio.CancelledError:
        if interruption.by is None:
            raise
        task.uncancel()
    finally:
        restore()

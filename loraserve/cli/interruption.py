"""SIGINT and SIGTERM end what a command sends, not what it does with the answers that came until then."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SIGNAL_STATUS = 128
"""A signal's number above it is the exit code of what the signal ended."""


@dataclass(slots=True)
class Interruption:
    by: signal.Signals | None = None


@contextmanager
def ended_by_signals() -> Iterator[Interruption]:
    """The first signal cancels what is awaited within, and the task goes on behind it; the next one has its usual
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

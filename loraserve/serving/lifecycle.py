"""Counts running sequences, and lets them finish while no new ones start."""

import asyncio

from loraserve.serving.errors import ErrorCode, ServingError

DRAIN_RETRY_AFTER_S = 5


class Lifecycle:
    """All methods are called on the event loop."""

    def __init__(self) -> None:
        self._draining = False
        self._num_sequences = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_sequences(self) -> int:
        """Sequences admitted and not finished."""
        return self._num_sequences

    def begin_drain(self) -> None:
        """From here on new inference requests are refused; running ones finish."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """True once nothing runs, False if something still does after `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def check_open(self) -> None:
        if self._draining:
            message = "The server is shutting down and accepts no new requests. Retry on another replica."
            raise ServingError(ErrorCode.SERVER_DRAINING, message, retry_after_s=DRAIN_RETRY_AFTER_S)

    def enter(self, num_sequences: int) -> None:
        """Raises `ServingError` while draining. Every enter is matched by exactly one exit."""
        self.check_open()
        self._num_sequences += num_sequences
        self._idle.clear()

    def exit(self, num_sequences: int) -> None:
        self._num_sequences -= num_sequences
        if self._num_sequences == 0:
            self._idle.set()

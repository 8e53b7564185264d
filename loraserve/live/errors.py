"""Errors between this process and its Redis."""


class LiveError(Exception):
    """Base class of all errors here."""


class LiveUnavailableError(LiveError):
    """Redis did not answer in time, refused, or is not called for a moment because it just failed to answer.

    A command that was sent may or may not have taken effect.
    """

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{reason} (next attempt in {retry_after_s:g} s)")
        self.reason = reason
        self.retry_after_s = retry_after_s


class LiveRefusedError(LiveUnavailableError):
    """Redis answered, but refused the command, for example because it is full."""


class LiveRestartedError(LiveUnavailableError):
    """Redis is not the server process with which this process compared its documents; it may hold older ones."""


class LiveSchemaError(LiveError):
    """The keys in Redis were written by an incompatible version of loraserve."""


class LiveUrlError(LiveError):
    """The given URL is not a Redis URL."""


class LiveServerError(LiveError):
    """The private server cannot be started; the message names its log."""

"""What can go wrong between this process and its Redis."""


class LiveError(Exception):
    """Base of all."""


class LiveUnavailableError(LiveError):
    """Redis did not answer in time, refused, or is not asked for a moment because it just did not answer.

    Whether a command sent had its effect is unknown.
    """

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{reason} (tried again in {retry_after_s:g} s)")
        self.retry_after_s = retry_after_s


class LiveRefusedError(LiveUnavailableError):
    """Redis answered that it does not do this, as one that is full does not take anything new."""


class LiveRestartedError(LiveUnavailableError):
    """Redis is another process than the one this process compared its documents with; it may hold older ones."""


class LiveSchemaError(LiveError):
    """The keys in Redis were written by an incompatible version of loraserve."""


class LiveUrlError(LiveError):
    """What should be Redis's URL is none."""


class LiveServerError(LiveError):
    """The private server cannot be started; the message names its log."""

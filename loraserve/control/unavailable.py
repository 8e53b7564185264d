"""Errors while Redis is unreachable or full, or has newer revisions than the disk."""

from collections.abc import Iterator
from contextlib import contextmanager

from loraserve.live.errors import LiveUnavailableError
from loraserve.serving.errors import ErrorCode, ServingError

RETRY_AFTER_S = 2
"""The breaker retries once a second, and the reconciliation takes up to a few seconds."""


def live_unavailable() -> ServingError:
    message = (
        "The server's Redis is not reachable or accepts no writes, so nothing can be changed or admitted now. "
        "Retry in a few seconds."
    )
    return ServingError(ErrorCode.SERVICE_UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)


@contextmanager
def redis_required() -> Iterator[None]:
    """Translates the error of a call that cannot do without Redis into a `ServingError` (503)."""
    try:
        yield
    except LiveUnavailableError as error:
        raise live_unavailable() from error


def not_newest(what: str) -> ServingError:
    """what: the document or documents of which Redis has a newer revision."""
    message = (
        f"The server's data directory does not have the newest revision of {what}. Retry in a few seconds. If this "
        "persists, the directory is an older copy; the server's log says what to do."
    )
    return ServingError(ErrorCode.SERVICE_UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)

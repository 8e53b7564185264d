"""What a client is told while Redis is gone or full."""

from loraserve.serving.errors import ErrorCode, ServingError

RETRY_AFTER_S = 2
"""The breaker tries once a second and the reconciliation takes up to a few."""


def live_unavailable() -> ServingError:
    message = (
        "The server's Redis is not reachable or takes no changes, so nothing can be changed or admitted now. "
        "Retry in a few seconds."
    )
    return ServingError(ErrorCode.SERVICE_UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)

"""Limits as reported to clients."""

import math

from loraserve.live.admission_records import Budget, Limited, Measure, Scope
from loraserve.serving.errors import ErrorCode, ServingError


def budget_headers(requests: Budget | None, tokens: Budget | None) -> dict[str, str]:
    """x-ratelimit-* for what has a limit; the reset is when it would be full again."""
    headers: dict[str, str] = {}
    for measure, budget in ((Measure.REQUESTS, requests), (Measure.TOKENS, tokens)):
        if budget is not None:
            headers |= _headers(measure, budget.limit, budget.remaining, budget.reset_ms)
    return headers


def limit_error(limited: Limited) -> ServingError:
    """429, with a Retry-After after which the request succeeds if no other comes in between."""
    whose = {Scope.KEY: "Your API key's", Scope.TENANT: "Your tenant's"}[limited.scope]
    what = {
        Measure.REQUESTS: f"limit of {limited.limit} requests a minute",
        Measure.TOKENS: f"limit of {limited.limit} tokens a minute",
        Measure.CONCURRENT: f"limit of {limited.limit} requests at a time",
    }[limited.measure]
    if limited.retry_ms is None:
        return ServingError(ErrorCode.RATE_LIMITED, f"{whose} {what} refuses every request. An admin can raise it.")
    retry_after_s = max(1, math.ceil(limited.retry_ms / 1000))
    headers: dict[str, str] = {}
    if limited.measure is not Measure.CONCURRENT:
        headers = _headers(limited.measure, limited.limit, 0, limited.retry_ms)
    message = f"{whose} {what} is reached. Retry in {retry_after_s} s."
    return ServingError(ErrorCode.RATE_LIMITED, message, retry_after_s=retry_after_s, headers=headers)


def _headers(measure: Measure, limit: int, remaining: int, reset_ms: int) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{measure}": str(limit),
        f"x-ratelimit-remaining-{measure}": str(remaining),
        f"x-ratelimit-reset-{measure}": f"{reset_ms / 1000:.3f}s",
    }

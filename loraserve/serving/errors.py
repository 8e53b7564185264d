"""The single error type for everything reported to clients. `api/http/errors.py` maps its stable codes to HTTP."""

from collections.abc import Mapping
from enum import StrEnum


class ErrorCode(StrEnum):
    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    MISSING_PARAMETER = "missing_required_parameter"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    ADAPTER_NOT_ACTIVATED = "adapter_not_activated"
    ADAPTER_ALREADY_LOADED = "adapter_already_loaded"
    ADAPTER_INVALID = "adapter_invalid"
    ADAPTER_REJECTED = "adapter_rejected"
    ADAPTER_OTHER_BASE = "adapter_other_base"
    ADAPTER_TEMPLATE_MISSING = "adapter_template_missing"
    INVALID_API_KEY = "invalid_api_key"
    FORBIDDEN = "forbidden"
    TENANT_SUSPENDED = "tenant_suspended"
    MODEL_NOT_FOUND = "model_not_found"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    UPLOAD_OFFSET = "upload_offset"
    UPLOAD_STATE = "upload_state"
    PRECONDITION_FAILED = "precondition_failed"
    REQUEST_TOO_LARGE = "request_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    RATE_LIMITED = "rate_limit_exceeded"
    INSUFFICIENT_QUOTA = "insufficient_quota"
    QUEUE_FULL = "queue_full"
    CLIENT_CLOSED_REQUEST = "client_closed_request"
    REQUEST_ABORTED = "request_aborted"
    INTERNAL_ERROR = "internal_error"
    ENGINE_ERROR = "engine_error"
    ADAPTER_UNREADABLE = "adapter_unreadable"
    NOT_FINITE = "not_finite"
    ENGINE_DEAD = "engine_dead"
    SERVER_DRAINING = "server_draining"
    SERVICE_UNAVAILABLE = "service_unavailable"


SERVER_FAULTS = frozenset(
    {
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.ENGINE_ERROR,
        ErrorCode.ADAPTER_UNREADABLE,
        ErrorCode.NOT_FINITE,
        ErrorCode.ENGINE_DEAD,
        ErrorCode.SERVER_DRAINING,
        ErrorCode.SERVICE_UNAVAILABLE,
    }
)
"""Codes that are answered with 5xx."""


NO_RETRY = {"x-should-retry": "false"}
"""Without it, OpenAI's clients retry a 409."""


class ServingError(Exception):
    """The request was refused or failed. `message` has the value, the limit and the remedy, and is safe to show."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """headers: additional response headers, such as x-ratelimit-*."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    def copy(self) -> "ServingError":
        """A copy. Raise a copy of an error that is kept: a raised exception references its stack frames, and keeping it
        would keep all their objects alive."""
        return ServingError(
            self.code, self.message, param=self.param, retry_after_s=self.retry_after_s, headers=self.headers
        )


def missing(param: str) -> ServingError:
    return ServingError(ErrorCode.MISSING_PARAMETER, f"'{param}' is missing.", param=param)


def invalid_value(param: str, message: str) -> ServingError:
    return ServingError(ErrorCode.INVALID_VALUE, f"'{param}' {message}", param=param)

"""One error for everything a client can be told, with a stable code. `api/errors.py` maps codes to HTTP."""

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
    ADAPTER_ALREADY_LOADED = "adapter_already_loaded"
    ADAPTER_INVALID = "adapter_invalid"
    INVALID_API_KEY = "invalid_api_key"
    FORBIDDEN = "forbidden"
    MODEL_NOT_FOUND = "model_not_found"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TOO_LARGE = "request_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    QUEUE_FULL = "queue_full"
    CLIENT_CLOSED_REQUEST = "client_closed_request"
    INTERNAL_ERROR = "internal_error"
    ENGINE_ERROR = "engine_error"
    ADAPTER_UNREADABLE = "adapter_unreadable"
    NOT_FINITE = "not_finite"
    ENGINE_DEAD = "engine_dead"
    SERVER_DRAINING = "server_draining"


class ServingError(Exception):
    """Refused or failed; `message` carries the value, the limit and the remedy and is safe to show."""

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def invalid_value(param: str, message: str) -> ServingError:
    return ServingError(ErrorCode.INVALID_VALUE, f"'{param}' {message}", param=param)

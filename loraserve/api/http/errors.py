"""The table from error codes to HTTP statuses and OpenAI types, and the body of every error on every route."""

import errno
import logging
from http import HTTPStatus

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.types import Scope
from msgspec import UNSET, UnsetType

from loraserve.api.http.state import runtime_of
from loraserve.api.schemas.reports import ReportItem, report_item
from loraserve.control.ingest.report import AdapterRejectedError
from loraserve.control.unavailable import live_unavailable
from loraserve.live.errors import LiveUnavailableError
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.errors import DamagedFileError, UnreadFileError

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
ANSWERED_KEY = "loraserve_answered_error"

ERROR_TABLE: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.INVALID_JSON: (400, INVALID_REQUEST),
    ErrorCode.INVALID_REQUEST: (400, INVALID_REQUEST),
    ErrorCode.INVALID_TYPE: (400, INVALID_REQUEST),
    ErrorCode.INVALID_VALUE: (400, INVALID_REQUEST),
    ErrorCode.MISSING_PARAMETER: (400, INVALID_REQUEST),
    ErrorCode.UNKNOWN_PARAMETER: (400, INVALID_REQUEST),
    ErrorCode.UNSUPPORTED_PARAMETER: (400, INVALID_REQUEST),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, INVALID_REQUEST),
    ErrorCode.ADAPTER_NOT_ACTIVATED: (400, INVALID_REQUEST),
    ErrorCode.ADAPTER_ALREADY_LOADED: (400, INVALID_REQUEST),
    ErrorCode.ADAPTER_INVALID: (400, INVALID_REQUEST),
    ErrorCode.ADAPTER_REJECTED: (400, INVALID_REQUEST),
    ErrorCode.INVALID_API_KEY: (401, "authentication_error"),
    ErrorCode.FORBIDDEN: (403, "permission_error"),
    ErrorCode.TENANT_SUSPENDED: (403, "permission_error"),
    ErrorCode.MODEL_NOT_FOUND: (404, "not_found_error"),
    ErrorCode.ADAPTER_NOT_FOUND: (404, "not_found_error"),
    ErrorCode.NOT_FOUND: (404, "not_found_error"),
    ErrorCode.METHOD_NOT_ALLOWED: (405, INVALID_REQUEST),
    ErrorCode.CONFLICT: (409, INVALID_REQUEST),
    ErrorCode.ADAPTER_OTHER_BASE: (409, INVALID_REQUEST),
    ErrorCode.ADAPTER_TEMPLATE_MISSING: (409, INVALID_REQUEST),
    ErrorCode.IDEMPOTENCY_CONFLICT: (409, INVALID_REQUEST),
    ErrorCode.UPLOAD_OFFSET: (409, INVALID_REQUEST),
    ErrorCode.UPLOAD_STATE: (409, INVALID_REQUEST),
    ErrorCode.PRECONDITION_FAILED: (412, INVALID_REQUEST),
    ErrorCode.REQUEST_TOO_LARGE: (413, INVALID_REQUEST),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: (415, INVALID_REQUEST),
    ErrorCode.RATE_LIMITED: (429, "rate_limit_error"),
    ErrorCode.INSUFFICIENT_QUOTA: (429, "rate_limit_error"),
    ErrorCode.QUEUE_FULL: (429, "rate_limit_error"),
    ErrorCode.HEADERS_TOO_LARGE: (431, INVALID_REQUEST),
    ErrorCode.CLIENT_CLOSED_REQUEST: (499, INVALID_REQUEST),
    # Clients retry a 409 or 5xx automatically; a request that an operator ended should stay ended.
    ErrorCode.REQUEST_ABORTED: (499, INVALID_REQUEST),
    ErrorCode.INTERNAL_ERROR: (500, SERVER_ERROR),
    ErrorCode.ENGINE_ERROR: (500, SERVER_ERROR),
    ErrorCode.ADAPTER_UNREADABLE: (500, SERVER_ERROR),
    ErrorCode.NOT_FINITE: (500, SERVER_ERROR),
    ErrorCode.ENGINE_DEAD: (503, SERVER_ERROR),
    ErrorCode.SERVER_DRAINING: (503, SERVER_ERROR),
    ErrorCode.SERVICE_UNAVAILABLE: (503, SERVER_ERROR),
}

DISK_REFUSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})

CODE_OF_STATUS: dict[int, ErrorCode] = {
    400: ErrorCode.INVALID_VALUE,
    401: ErrorCode.INVALID_API_KEY,
    403: ErrorCode.FORBIDDEN,
    404: ErrorCode.NOT_FOUND,
    405: ErrorCode.METHOD_NOT_ALLOWED,
    413: ErrorCode.REQUEST_TOO_LARGE,
    415: ErrorCode.UNSUPPORTED_MEDIA_TYPE,
}
"""For errors that the framework raises itself."""


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str
    report: ReportItem | UnsetType = UNSET
    """For a refused adapter: all checks."""


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(error: ServingError) -> ErrorResponse:
    report = report_item(error.report) if isinstance(error, AdapterRejectedError) else UNSET
    return ErrorResponse(ErrorDetail(error.message, ERROR_TABLE[error.code][1], error.param, error.code.value, report))


def status_of(error: ServingError) -> int:
    return ERROR_TABLE[error.code][0]


def error_headers(error: ServingError) -> dict[str, str]:
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.code is ErrorCode.INVALID_API_KEY:
        headers["www-authenticate"] = "Bearer"
    return headers


def internal_error() -> ServingError:
    """For unexpected errors: the log has the details, the client gets none."""
    return ServingError(ErrorCode.INTERNAL_ERROR, "The server failed to handle the request. Its log says why.")


def cut_short() -> ServingError:
    """For an answer that the server ended before the model did."""
    return ServingError(ErrorCode.SERVER_DRAINING, "The generation was cut short. Retry.")


def serving_error_of(request: Request, error: Exception) -> ServingError:
    """The error to report to the client, whatever was raised."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, LiveUnavailableError):
        return live_unavailable()
    if isinstance(error, ValidationException) and (refusal := _refused_parameter(error)) is not None:
        return refusal
    if isinstance(error, HTTPException) and (code := CODE_OF_STATUS.get(error.status_code)) is not None:
        return ServingError(code, _message(request, error.status_code), headers=error.headers)
    # Escaped, so that a client cannot write lines of its own into the log.
    path = ascii(request.scope["path"][:256])
    if isinstance(error, OSError) and error.errno in DISK_REFUSES:
        logger.error("%s %s failed: %s", request.method, path, error)
        message = f"The server's disk refused the operation: {error.strerror}. The request was not carried out."
        return ServingError(ErrorCode.SERVICE_UNAVAILABLE, message)
    if isinstance(error, UnreadFileError):
        logger.error("%s %s failed: %s", request.method, path, error)
        message = "The server cannot read that from its disk now; its log says why. The request was not carried out."
        return ServingError(ErrorCode.SERVICE_UNAVAILABLE, message)
    if isinstance(error, DamagedFileError):
        # NOTE: its message names files of the server and what to do with them; clients read only that there is one.
        logger.error("%s %s failed: %s", request.method, path, error)
        message = "A file in the server's data directory is damaged; its log names it. The request was not carried out."
        return ServingError(ErrorCode.INTERNAL_ERROR, message)
    logger.error("%s %s failed", request.method, path, exc_info=error)
    return internal_error()


def answered_error(request: Request, error: Exception) -> ServingError:
    """Like `serving_error_of`, but also counts the error and keeps its code for `answered_code`."""
    refusal = serving_error_of(request, error)
    runtime_of(request).metrics.error(refusal.code)
    request.scope["state"][ANSWERED_KEY] = refusal.code
    return refusal


def answered_code(scope: Scope) -> ErrorCode | None:
    """The code of the error that `answered_error` returned, if any."""
    return scope["state"].get(ANSWERED_KEY)


def handle_error(request: Request, error: Exception) -> Response[ErrorResponse]:
    refusal = answered_error(request, error)
    return Response(
        error_body(refusal),
        status_code=status_of(refusal),
        headers=error_headers(refusal),
        media_type="application/json",
    )


def _refused_parameter(error: ValidationException) -> ServingError | None:
    """The error for a query or path parameter that the framework could not read, if it names one."""
    found = error.extra[0] if isinstance(error.extra, list) and error.extra else None
    if not isinstance(found, dict) or "key" not in found:
        return None
    return invalid_value(str(found["key"]), f"cannot be read: {str(found.get('message', '')).lower()}.")


def _message(request: Request, status: int) -> str:
    limits = runtime_of(request).settings.limits
    match status:
        case 404:
            return f"There is nothing at {request.method} {request.scope['path']}."
        case 405:
            return f"{request.method} is not allowed at {request.scope['path']}."
        case 413:
            return f"The request body is larger than {limits.max_body_bytes} bytes."
        case _:
            return f"{HTTPStatus(status).phrase}."

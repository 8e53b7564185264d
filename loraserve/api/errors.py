"""One table from error code to HTTP status and OpenAI type, and one body for every error on every route."""

import logging
from http import HTTPStatus

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException

from loraserve.api.state import runtime_of
from loraserve.serving.errors import ErrorCode, ServingError

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

ERROR_TABLE: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.INVALID_JSON: (400, INVALID_REQUEST),
    ErrorCode.INVALID_REQUEST: (400, INVALID_REQUEST),
    ErrorCode.INVALID_TYPE: (400, INVALID_REQUEST),
    ErrorCode.INVALID_VALUE: (400, INVALID_REQUEST),
    ErrorCode.MISSING_PARAMETER: (400, INVALID_REQUEST),
    ErrorCode.UNKNOWN_PARAMETER: (400, INVALID_REQUEST),
    ErrorCode.UNSUPPORTED_PARAMETER: (400, INVALID_REQUEST),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, INVALID_REQUEST),
    ErrorCode.ADAPTER_ALREADY_LOADED: (400, INVALID_REQUEST),
    ErrorCode.ADAPTER_INVALID: (400, INVALID_REQUEST),
    ErrorCode.INVALID_API_KEY: (401, "authentication_error"),
    ErrorCode.FORBIDDEN: (403, "permission_error"),
    ErrorCode.MODEL_NOT_FOUND: (404, "not_found_error"),
    ErrorCode.ADAPTER_NOT_FOUND: (404, "not_found_error"),
    ErrorCode.NOT_FOUND: (404, "not_found_error"),
    ErrorCode.METHOD_NOT_ALLOWED: (405, INVALID_REQUEST),
    ErrorCode.REQUEST_TOO_LARGE: (413, INVALID_REQUEST),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: (415, INVALID_REQUEST),
    ErrorCode.QUEUE_FULL: (429, "rate_limit_error"),
    ErrorCode.HEADERS_TOO_LARGE: (431, INVALID_REQUEST),
    ErrorCode.CLIENT_CLOSED_REQUEST: (499, INVALID_REQUEST),
    ErrorCode.INTERNAL_ERROR: (500, SERVER_ERROR),
    ErrorCode.ENGINE_ERROR: (500, SERVER_ERROR),
    ErrorCode.ADAPTER_UNREADABLE: (500, SERVER_ERROR),
    ErrorCode.NOT_FINITE: (500, SERVER_ERROR),
    ErrorCode.ENGINE_DEAD: (503, SERVER_ERROR),
    ErrorCode.SERVER_DRAINING: (503, SERVER_ERROR),
}

CODE_OF_STATUS: dict[int, ErrorCode] = {
    400: ErrorCode.INVALID_VALUE,
    401: ErrorCode.INVALID_API_KEY,
    403: ErrorCode.FORBIDDEN,
    404: ErrorCode.NOT_FOUND,
    405: ErrorCode.METHOD_NOT_ALLOWED,
    413: ErrorCode.REQUEST_TOO_LARGE,
    415: ErrorCode.UNSUPPORTED_MEDIA_TYPE,
}
"""What the framework raises by itself."""


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(error: ServingError) -> ErrorResponse:
    return ErrorResponse(ErrorDetail(error.message, ERROR_TABLE[error.code][1], error.param, error.code.value))


def status_of(error: ServingError) -> int:
    return ERROR_TABLE[error.code][0]


def error_headers(error: ServingError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.code is ErrorCode.INVALID_API_KEY:
        headers["www-authenticate"] = "Bearer"
    return headers


def internal_error() -> ServingError:
    """For what we did not foresee: the log has the details, the client gets none."""
    return ServingError(ErrorCode.INTERNAL_ERROR, "The server failed to handle the request. Its log says why.")


def handle_serving_error(request: Request, error: ServingError) -> Response[ErrorResponse]:
    runtime_of(request).metrics.error(error.code)
    return Response(
        error_body(error), status_code=status_of(error), headers=error_headers(error), media_type="application/json"
    )


def handle_http_exception(request: Request, error: HTTPException) -> Response[ErrorResponse]:
    code = CODE_OF_STATUS.get(error.status_code)
    if code is None:
        return handle_exception(request, error)
    response = handle_serving_error(request, ServingError(code, _message(request, error.status_code)))
    if error.headers:
        response.headers.update(error.headers)
    return response


def handle_exception(request: Request, error: Exception) -> Response[ErrorResponse]:
    logger.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    return handle_serving_error(request, internal_error())


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

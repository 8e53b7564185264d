"""Errors in the format of Anthropic's API: `{type: "error", error: {type, message}, request_id}`."""

from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import Scope
from msgspec import UNSET

from loraserve.api.http.errors import ERROR_TABLE, answered_error, error_headers, status_of
from loraserve.api.http.request_id import request_id_of
from loraserve.api.schemas.message_answer import MessageError, MessageErrorDetail, ThreadRefusal
from loraserve.serving.errors import ServingError

TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
"""By status; for other statuses, those of `ERROR_TABLE`."""
REQUEST_ID = "request-id"
"""The header that Anthropic's clients read."""


def message_error(error: ServingError, scope: Scope) -> MessageError:
    status, kind = ERROR_TABLE[error.code]
    details = ThreadRefusal() if error.param == "thread" else UNSET
    return MessageError(MessageErrorDetail(TYPES.get(status, kind), error.message, details), request_id_of(scope))


def handle_as_anthropic(request: Request, error: Exception) -> Response[MessageError]:
    refusal = answered_error(request, error)
    return Response(
        message_error(refusal, request.scope),
        status_code=status_of(refusal),
        headers=error_headers(refusal) | {REQUEST_ID: request_id_of(request.scope)},
        media_type="application/json",
    )


ANTHROPIC_ERRORS = {
    ServingError: handle_as_anthropic,
    HTTPException: handle_as_anthropic,
    Exception: handle_as_anthropic,
}
"""`exception_handlers` of Anthropic's routes."""

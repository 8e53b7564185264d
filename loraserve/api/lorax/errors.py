"""Errors in the format of LoRAX and TGI: their status codes and `{error, error_type}`."""

from litestar import Request, Response
from litestar.exceptions import HTTPException

from loraserve.api.http.errors import ERROR_TABLE, INVALID_REQUEST, answered_error, error_headers
from loraserve.api.schemas.lorax import LoraxError
from loraserve.serving.errors import ErrorCode, ServingError

VALIDATION, GENERATION, OVERLOADED, INCOMPLETE = "validation", "generation", "overloaded", "incomplete_generation"
KEPT_STATUSES = (401, 403, 405, 413, 415, 431, 499)
CUT_SHORT = (ErrorCode.ENGINE_DEAD, ErrorCode.SERVER_DRAINING, ErrorCode.INTERNAL_ERROR)


def lorax_error(error: ServingError) -> tuple[int, LoraxError]:
    """Status and body."""
    status, kind = ERROR_TABLE[error.code]
    if status == 429:
        return status, LoraxError(error.message, OVERLOADED)
    if status in KEPT_STATUSES:
        return status, LoraxError(error.message, VALIDATION if kind == INVALID_REQUEST else kind)
    if kind == INVALID_REQUEST:
        return 422, LoraxError(error.message, VALIDATION)
    if error.code is ErrorCode.SERVICE_UNAVAILABLE:
        return status, LoraxError(error.message, OVERLOADED)
    if error.code in CUT_SHORT:
        return 500, LoraxError(error.message, INCOMPLETE)
    # Includes an adapter that does not exist, which LoRAX discovers only during generation.
    return 424, LoraxError(error.message, GENERATION)


def handle_as_lorax(request: Request, error: Exception) -> Response[LoraxError]:
    refusal = answered_error(request, error)
    status, body = lorax_error(refusal)
    return Response(body, status_code=status, headers=error_headers(refusal), media_type="application/json")


LORAX_ERRORS = {ServingError: handle_as_lorax, HTTPException: handle_as_lorax, Exception: handle_as_lorax}
"""`exception_handlers` of the LoRAX routes."""

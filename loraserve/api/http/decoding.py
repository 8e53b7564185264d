"""Strict request bodies: a field with a wrong type, an unknown one or one we cannot honor is refused by name."""

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from litestar import Request

from loraserve.api.http.bodies import read_body
from loraserve.api.http.nesting import nesting_depth
from loraserve.api.http.quoting import MAX_QUOTED, beginning
from loraserve.api.http.state import runtime_of
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.serving.errors import ErrorCode, ServingError

T = TypeVar("T", bound=msgspec.Struct)

UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>.*)`")
PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")


async def decode_optional(request: Request, decoder: msgspec.json.Decoder[T], absent: T) -> T:
    """absent: returned if there is no body. Raises `ServingError`."""
    return await decode_body(request, decoder) if await read_body(request) else absent


async def decode_body(
    request: Request, decoder: msgspec.json.Decoder[T], explain: Callable[[bytes], None] | None = None
) -> T:
    """Raises `ServingError`. explain: may raise a clearer one for a body that the decoder refuses."""
    body = await read_body(request)
    max_depth = runtime_of(request).settings.limits.max_json_depth
    depth = nesting_depth(body, max_depth)
    if depth > max_depth:
        message = f"The request body is nested {depth} levels deep; the limit is {max_depth}."
        raise ServingError(ErrorCode.INVALID_JSON, message)
    try:
        body.decode()  # The decoder skips parts that are decoded later or never.
        decoded = decoder.decode(body)
    except msgspec.ValidationError as error:
        if explain is not None:
            explain(body)
        raise _refused(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServingError(ErrorCode.INVALID_JSON, f"The request body is not valid JSON: {error}") from error
    refuse_unsupported(decoded)
    return decoded


def _refused(reason: str) -> ServingError:
    at = PATH.search(reason)
    path = at["path"] if at else ""
    expectation = reason[: at.start()] if at else reason
    if found := UNKNOWN_FIELD.fullmatch(expectation):
        param = _joined(path, found["field"])
        return ServingError(ErrorCode.UNKNOWN_PARAMETER, f"Unknown parameter: '{param}'.", param=param)
    if found := MISSING_FIELD.fullmatch(expectation):
        param = _joined(path, found["field"])
        return ServingError(ErrorCode.MISSING_PARAMETER, f"Missing required parameter: '{param}'.", param=param)
    expectation = beginning(expectation, 2 * MAX_QUOTED)
    if expectation.startswith(("Invalid enum value", "Invalid value")):
        return ServingError(
            ErrorCode.INVALID_VALUE, f"'{path}': {expectation[0].lower()}{expectation[1:]}.", param=path
        )
    subject = f"'{path}'" if path else "the request body"
    return ServingError(ErrorCode.INVALID_TYPE, f"Invalid type for {subject}: {expectation}.", param=path or None)


def _joined(path: str, field: str) -> str:
    return beginning(f"{path}.{field}" if path else field)

"""Why a command's request failed."""

from typing import Any

import aiohttp
import msgspec
from msgspec import UNSET, UnsetType

MAX_MESSAGE = 200


class Failure(msgspec.Struct, frozen=True):
    code: str
    """Failures are counted by code: "HTTP 404 model_not_found", "stream server_error", "timeout", "tokens"."""
    message: str


class OpenAIError(msgspec.Struct, frozen=True):
    message: str
    code: str | int | None = None
    type: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's form. LoRAX has a string with `error_type` beside it; older vLLM had the fields at the top level."""

    error: OpenAIError | str | None = None
    error_type: str | None = None
    message: str | UnsetType = UNSET


def from_status(status: int, body: bytes) -> Failure:
    try:
        found = msgspec.json.decode(body, type=ErrorBody)
    except msgspec.DecodeError:
        return Failure(f"HTTP {status}", body[:MAX_MESSAGE].decode(errors="replace"))
    return _failure(f"HTTP {status}", found, body)


def from_event(error: Any) -> Failure:
    """For an error event within a stream that began with status 200."""
    body = msgspec.json.encode({"error": error})
    try:
        return _failure("stream", msgspec.json.decode(body, type=ErrorBody), body)
    except msgspec.DecodeError:
        return Failure("stream", body[:MAX_MESSAGE].decode(errors="replace"))


def from_exception(error: aiohttp.ClientError | TimeoutError) -> Failure:
    if isinstance(error, TimeoutError):
        return Failure("timeout", f"{type(error).__name__}: {error}")
    return Failure("connection", f"{type(error).__name__}: {error}")


def _failure(where: str, found: ErrorBody, body: bytes) -> Failure:
    match found.error:
        case OpenAIError(message=message, code=code, type=kind):
            named = code if isinstance(code, str) else kind
        case str(message):
            named = found.error_type
        case _:
            named = None
            message = found.message if found.message is not UNSET else body[:MAX_MESSAGE].decode(errors="replace")
    return Failure(f"{where} {named}" if named else where, message)

"""Requests that a client may repeat without a second effect, identified by their Idempotency-Key."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from litestar import Request

from loraserve.api.http.auth import principal_of
from loraserve.api.http.bodies import read_body
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.sessions import IdempotencyRecord, LiveSessions
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value

HEADER = "idempotency-key"
MAX_CHARS = 255
RETRY_AFTER_S = 1

T = TypeVar("T", bound=msgspec.Struct)


async def once(
    request: Request,
    sessions: LiveSessions,
    work: Callable[[], Awaitable[T]],
    answer: type[T],
    *,
    kept: Callable[[T], T] = lambda given: given,
) -> T:
    """The result of `work`; for 24 hours, a repetition with the same Idempotency-Key gets that result without running
    `work` again.

    kept: the part of the result that is stored for repetitions. Raises `ServingError`: 409 for the same key with
    another body, or while the first request is still running.
    """
    given = request.headers.get(HEADER)
    if given is None:
        return await work()
    if not 1 <= len(given) <= MAX_CHARS:
        raise invalid_value("Idempotency-Key", f"has {len(given)} characters; it must have 1 to {MAX_CHARS}.")
    principal = principal_of(request)
    record = IdempotencyRecord(
        tenant=principal.acting_tenant,
        client_key=_hash(principal.actor.encode(), given.encode()),
        fingerprint=_hash(request.method.encode(), request.scope["path"].encode(), await read_body(request)),
    )
    known = await sessions.begin_idempotent(record)
    if known is not None:
        return _replayed(known, record, answer)
    try:
        result = await work()
    except BaseException:
        await _forget(sessions, record)
        raise
    await _keep(sessions, msgspec.structs.replace(record, response=msgspec.Raw(msgspec.json.encode(kept(result)))))
    return result


def _replayed(known: IdempotencyRecord, record: IdempotencyRecord, answer: type[T]) -> T:
    if known.fingerprint != record.fingerprint:
        message = "This Idempotency-Key was used for another request within the last 24 hours. Choose another."
        raise ServingError(ErrorCode.IDEMPOTENCY_CONFLICT, message)
    if not known.is_done:
        message = "The first request with this Idempotency-Key is still being processed. Retry."
        raise ServingError(ErrorCode.IDEMPOTENCY_CONFLICT, message, retry_after_s=RETRY_AFTER_S)
    return msgspec.json.decode(known.response, type=answer)


async def _keep(sessions: LiveSessions, record: IdempotencyRecord) -> None:
    try:
        await sessions.end_idempotent(record)
    except LiveUnavailableError:
        return  # The work is done, and its result may have a secret. A repetition is treated as after a crash.


async def _forget(sessions: LiveSessions, record: IdempotencyRecord) -> None:
    try:
        await sessions.cancel_idempotent(record.tenant, record.client_key)
    except LiveUnavailableError:
        return  # The record expires by itself; until then, a repetition gets a 409.


def _hash(*parts: bytes) -> str:
    joined = hashlib.sha256()
    for part in parts:
        joined.update(len(part).to_bytes(8, "big") + part)
    return joined.hexdigest()

"""Converts upload sessions and reports into the API's items; finds the position of an uploaded chunk."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from litestar import Request

from loraserve.api.http.bodies import stream_body
from loraserve.api.schemas.reports import report_item
from loraserve.api.schemas.uploads import UploadFileItem, UploadItem, UploadResult
from loraserve.control.uploads.states import report_of
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.upload_session import UploadSession

CONTENT_RANGE = re.compile(r"bytes (?P<start>\d{1,15})-(?P<end>\d{1,15})/(?P<total>\d{1,15}|\*)")


def upload_item(session: UploadSession) -> UploadItem:
    report, result = report_of(session), session.result
    return UploadItem(
        id=session.id,
        adapter=session.name,
        tenant=session.tenant,
        state=session.state,
        files=[UploadFileItem(file.name, file.size_bytes, file.received_bytes) for file in session.files],
        activate=session.activate,
        chunk_bytes=session.chunk_bytes,
        created_at=session.created_at,
        expires_at=session.expires_at,
        by=session.actor,
        result=None if result is None else UploadResult(result.version, result.digest, result.created),
        report=None if report is None else report_item(report),
        error=session.error,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    start: int
    """Position of the body in its file, in bytes."""
    body: AsyncIterator[bytes]
    """As it arrives. Raises `ServingError` if its length is not the one in Content-Range."""
    file_bytes: int | None
    """Size of the file according to Content-Range; None: not given."""


def chunk_of(request: Request) -> Chunk:
    """Raises `ServingError`."""
    given = request.headers.get("content-range")
    if given is None:
        return Chunk(0, stream_body(request), None)
    found = CONTENT_RANGE.fullmatch(given.strip())
    if found is None or int(found["end"]) < int(found["start"]):
        raise invalid_value("Content-Range", "must have the form 'bytes <first>-<last>/<size of the file>'.")
    start, length = int(found["start"]), int(found["end"]) - int(found["start"]) + 1
    file_bytes = None if found["total"] == "*" else int(found["total"])
    return Chunk(start, _exactly(stream_body(request), length), file_bytes)


async def _exactly(body: AsyncIterator[bytes], length: int) -> AsyncIterator[bytes]:
    num_left = length
    async for piece in body:
        num_left -= len(piece)
        if num_left < 0:
            raise _wrong_length("more", length)
        yield piece
    if num_left:
        raise _wrong_length("fewer", length)


def _wrong_length(more_or_fewer: str, length: int) -> ServingError:
    message = f"The body has {more_or_fewer} bytes than the {length} in Content-Range."
    return ServingError(ErrorCode.INVALID_REQUEST, message)

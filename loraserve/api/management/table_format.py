"""Responses for programs other than the console, which browsers save as files."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

from litestar import Response
from litestar.response import Stream

PIECE_BYTES = 256 << 10


def as_attachment(text: str, media_type: str, filename: str) -> Response[Any]:
    return Response(cast(Any, text.encode()), media_type=media_type, headers=_headers(filename))


def streamed_attachment(lines: Iterator[bytes], media_type: str, filename: str) -> Response[Any]:
    """Generated on threads while it is sent. An error in the middle breaks the connection, so that no client takes a
    part for the whole."""
    # NOTE: not Litestar's own iterator, which treats a ValueError in the middle as the end.
    return Stream(_pieces(lines), media_type=media_type, headers=_headers(filename))


def _headers(filename: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{filename}"', "x-content-type-options": "nosniff"}


async def _pieces(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(_piece, lines):
        yield piece


def _piece(lines: Iterator[bytes]) -> bytes:
    """Whole lines of at least `PIECE_BYTES` in total, or the last ones; empty at the end."""
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= PIECE_BYTES:
            break
    return bytes(piece)

"""Answers for other programs than the console, which browsers save as files."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

from litestar import Response
from litestar.response import Stream

PIECE_BYTES = 256 << 10


def as_attachment(text: str, media_type: str, filename: str) -> Response[Any]:
    return Response(cast(Any, text.encode()), media_type=media_type, headers=_headers(filename))


def streamed_attachment(lines: Iterator[bytes], media_type: str, filename: str) -> Response[Any]:
    """Made as it is sent, on threads. An error in the middle breaks the connection, so none takes a part for all."""
    # NOTE: no iterator of Litestar's own, which takes a ValueError in the middle for the end.
    return Stream(_pieces(lines), media_type=media_type, headers=_headers(filename))


def _headers(filename: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{filename}"', "x-content-type-options": "nosniff"}


async def _pieces(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(_piece, lines):
        yield piece


def _piece(lines: Iterator[bytes]) -> bytes:
    """Whole lines that make `PIECE_BYTES`; empty at the end."""
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= PIECE_BYTES:
            break
    return bytes(piece)

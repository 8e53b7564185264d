"""Answers with a revision."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from litestar import Request, Response

from loraserve.api.management.etags import etag_header, has_seen

T = TypeVar("T")

NOT_CACHED = {"cache-control": "no-store"}
"""Of what has an ETag, or says when it was made. Browsers go by these and the URL, and so show what they had: another
tenant's adapter of that name and revision, or what has changed since without a revision."""


def shown(request: Request, rev: int, build: Callable[[], T]) -> Response[T]:
    """304 without a body if the client has this revision."""
    headers = etag_header(rev) | NOT_CACHED
    if has_seen(request, rev):
        return Response(cast(Any, None), status_code=304, headers=headers)
    return Response(build(), headers=headers)


def changed(rev: int, item: T, status_code: int = 200) -> Response[T]:
    return Response(item, status_code=status_code, headers=etag_header(rev))

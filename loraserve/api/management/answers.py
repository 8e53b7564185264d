"""Answers with a revision."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from litestar import Request, Response

from loraserve.api.management.etags import etag_header, has_seen

T = TypeVar("T")


def shown(request: Request, rev: int, build: Callable[[], T]) -> Response[T]:
    """304 without a body if the client has this revision."""
    if has_seen(request, rev):
        return Response(cast(Any, None), status_code=304, headers=etag_header(rev))
    return Response(build(), headers=etag_header(rev))


def changed(rev: int, item: T, status_code: int = 200) -> Response[T]:
    return Response(item, status_code=status_code, headers=etag_header(rev))

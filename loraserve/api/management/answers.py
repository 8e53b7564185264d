"""Responses with a document's revision as their ETag."""

from typing import Any, TypeVar, cast

from litestar import Request, Response

from loraserve.api.management.etags import etag_header, has_seen, shown_etag

T = TypeVar("T")

NOT_CACHED = {"cache-control": "no-store"}
"""For responses with an ETag or a Last-Modified header. Browsers would cache them by URL alone and could then show, for
example, another tenant's adapter of the same name."""


def shown(request: Request, rev: int, item: T) -> Response[T]:
    """304 without a body if the client already has this."""
    tag = shown_etag(rev, item)
    headers = {"etag": tag} | NOT_CACHED
    if has_seen(request, tag):
        return Response(cast(Any, None), status_code=304, headers=headers)
    return Response(item, headers=headers)


def changed(rev: int, item: T, status_code: int = 200) -> Response[T]:
    return Response(item, status_code=status_code, headers=etag_header(rev))

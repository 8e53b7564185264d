"""Answers with a revision."""

from typing import Any, TypeVar, cast

from litestar import Request, Response

from loraserve.api.management.etags import etag_header, has_seen, shown_etag

T = TypeVar("T")

NOT_CACHED = {"cache-control": "no-store"}
"""Of what has an ETag, or says when it was made. Browsers go by these and the URL, and so show what they had, such as
another tenant's adapter of that name."""


def shown(request: Request, rev: int, item: T) -> Response[T]:
    """304 without a body if the client has this."""
    tag = shown_etag(rev, item)
    headers = {"etag": tag} | NOT_CACHED
    if has_seen(request, tag):
        return Response(cast(Any, None), status_code=304, headers=headers)
    return Response(item, headers=headers)


def changed(rev: int, item: T, status_code: int = 200) -> Response[T]:
    return Response(item, status_code=status_code, headers=etag_header(rev))

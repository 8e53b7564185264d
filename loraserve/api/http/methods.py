"""OPTIONS: which methods a path has."""

from collections.abc import Iterable

from litestar import Response, route
from litestar.handlers import HTTPRouteHandler

from loraserve.api.http.needs import PUBLIC


def tell_methods_of(handlers: Iterable[HTTPRouteHandler]) -> list[HTTPRouteHandler]:
    """OPTIONS at each path of `handlers`, with the methods that a 405 names too.

    NOTE: to be registered before them. Else Litestar answers, and names only what a path's first handler takes.
    """
    methods: dict[str, set[str]] = {}
    for handler in handlers:
        for path in handler.paths:
            methods.setdefault(path, {"OPTIONS"}).update(handler.http_methods)
    return [_tell_methods(path, ", ".join(sorted(found))) for path, found in methods.items()]


def _tell_methods(path: str, methods: str) -> HTTPRouteHandler:
    @route(path, http_method="OPTIONS", status_code=204, opt=PUBLIC, include_in_schema=False)
    async def tell_methods() -> Response[None]:
        return Response(None, headers={"allow": methods})

    return tell_methods

"""OPTIONS: the methods of a path."""

from collections.abc import Iterable

from litestar import Response, route
from litestar.handlers import HTTPRouteHandler

from loraserve.api.http.needs import PUBLIC


def options_handlers(handlers: Iterable[HTTPRouteHandler]) -> list[HTTPRouteHandler]:
    """Handlers that answer OPTIONS at each path of `handlers`, with the same methods as a 405.

    NOTE: must be registered before `handlers`. Otherwise Litestar answers, and lists only the methods of a path's first
    handler.
    """
    methods: dict[str, set[str]] = {}
    for handler in handlers:
        for path in handler.paths:
            methods.setdefault(path, {"OPTIONS"}).update(handler.http_methods)
    return [_options_handler(path, ", ".join(sorted(found))) for path, found in methods.items()]


def _options_handler(path: str, methods: str) -> HTTPRouteHandler:
    @route(path, http_method="OPTIONS", status_code=204, opt=PUBLIC, include_in_schema=False)
    async def list_methods() -> Response[None]:
        return Response(None, headers={"allow": methods})

    return list_methods

"""Refuses unknown query parameters of the management API: with a mistyped filter, a route would show everything."""

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import QueryParameter

from loraserve.api.http.needs import ACTION
from loraserve.control.tenancy.principal import Action
from loraserve.serving.errors import ErrorCode, ServingError


async def refuse_unknown_query(connection: ASGIConnection, handler: BaseRouteHandler) -> None:
    """A guard. Inference and health are exempt: clients and load balancers add their own parameters there.

    NOTE: must be a coroutine function. Litestar runs other guards in a thread of the event loop's pool, so every
    request would wait for the disk operations that keep these threads busy.

    Raises `ServingError`.
    """
    if handler.opt.get(ACTION) in (None, Action.INFER):
        return
    known = query_names(handler)
    for name in connection.query_params:
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes none"
            message = f"Unknown query parameter: '{name[:64]}'. {connection.url.path} {takes}."
            raise ServingError(ErrorCode.UNKNOWN_PARAMETER, message, param=name[:64])


def query_names(handler: BaseRouteHandler) -> list[str]:
    """As written in a URL, in the order of the handler's arguments."""
    parameters = handler.parsed_fn_signature.parameters.items()
    return [
        field.kwarg_definition.name or argument
        for argument, field in parameters
        if isinstance(field.kwarg_definition, QueryParameter)
    ]

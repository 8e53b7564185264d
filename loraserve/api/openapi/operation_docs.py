"""What the OpenAPI document says of operations besides their bodies: who may call them, and the headers they heed."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

from litestar.handlers import HTTPRouteHandler

from loraserve.api.http.needs import ACTION, EVERY_TENANT, PUBLIC_OPT
from loraserve.control.tenancy.principal import Action, roles_for

Json = dict[str, Any]
PATH_PARAMETER = re.compile(r"\{(\w+):\w+\}")
HEEDS = "heeds"
"""Of a route's `opt`: the names of the headers below."""

IF_NONE_MATCH, CREATE_ONLY, IF_MATCH = "if-none-match", "create-only", "if-match"
IDEMPOTENCY_KEY, CONTENT_RANGE = "idempotency-key", "content-range"
HEADERS: dict[str, tuple[str, str]] = {
    IF_NONE_MATCH: ("If-None-Match", "ETags that the client has: 304 where one of them is still right."),
    CREATE_ONLY: ("If-None-Match", '"*": make it, but change nothing (412 where it exists).'),
    IF_MATCH: ("If-Match", "The ETag that the change was decided on: 412 where it is not the newest."),
    IDEMPOTENCY_KEY: ("Idempotency-Key", "Any text: a second request with it, within 24 hours, does nothing again."),
    CONTENT_RANGE: ("Content-Range", 'Where a chunk belongs: "bytes 0-8388607/20971520". Without: the whole file.'),
}
SECURITY_SCHEMES: Json = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key, `ls-<id>_<secret>`; also taken from `x-api-key`. With a key for all tenants (`*`), "
        "`X-Tenant` says for which one it acts. A server without any key asks for none.",
    },
}


def heeds(*names: str) -> Json:
    """For a route's `opt`."""
    return {HEEDS: names}


def document_operations(document: Json, routes: Iterable[HTTPRouteHandler]) -> None:
    """In place."""
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    for route in routes:
        for operation in _operations_of(document, route):
            is_public = route.opt.get(PUBLIC_OPT, False)
            operation["security"] = [] if is_public else [{"key": []}]
            if not is_public:
                told = [operation.get("description", ""), _need(route)]
                operation["description"] = "\n\n".join(filter(None, told))
            for name in cast(tuple[str, ...], route.opt.get(HEEDS, ())):
                _add_header(operation, *HEADERS[name])
                if name == IF_NONE_MATCH:
                    operation["responses"]["304"] = {"description": "The client has it already."}


def _operations_of(document: Json, route: HTTPRouteHandler) -> Iterator[Json]:
    for path in route.paths:
        operations = document["paths"].get(PATH_PARAMETER.sub(r"{\1}", path), {})
        for method in route.http_methods:
            if method.lower() in operations:
                yield operations[method.lower()]


def _need(route: HTTPRouteHandler) -> str:
    action = cast(Action | None, route.opt.get(ACTION))
    if action is None:
        return "Needs a key of any role."
    roles = " or ".join(f"`{role}`" for role in roles_for(action))
    is_global = action is Action.ADMINISTER_ALL or route.opt.get(EVERY_TENANT, False)
    return f"Needs a key with the role {roles}{', for all tenants (`*`)' if is_global else ''}."


def _add_header(operation: Json, name: str, text: str) -> None:
    header = {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
    operation["parameters"] = [*operation.get("parameters", []), header]

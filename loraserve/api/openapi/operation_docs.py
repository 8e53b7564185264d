"""Documents operations beyond their bodies: the key that they require and the headers that they read."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

from litestar.handlers import HTTPRouteHandler

from loraserve.api.http.needs import ACTION, EVERY_TENANT, PUBLIC_OPT
from loraserve.control.tenancy.principal import Action, roles_for

Json = dict[str, Any]
PATH_PARAMETER = re.compile(r"\{(\w+):\w+\}")
HEEDS = "heeds"
"""Key in a route's `opt`: the names of the headers, from the constants below."""

IF_NONE_MATCH, CREATE_ONLY, IF_MATCH = "if-none-match", "create-only", "if-match"
IDEMPOTENCY_KEY, CONTENT_RANGE = "idempotency-key", "content-range"
HEADERS: dict[str, tuple[str, str]] = {
    IF_NONE_MATCH: ("If-None-Match", "ETags of the copies that the client has: 304 if one of them is current."),
    CREATE_ONLY: ("If-None-Match", '"*": create only; 412 if it exists.'),
    IF_MATCH: ("If-Match", "ETag of the revision to be changed: 412 if it is not the newest."),
    IDEMPOTENCY_KEY: (
        "Idempotency-Key",
        "1 to 255 characters. Repeating a request with the same key within 24 hours returns the first answer again, "
        "without a second effect.",
    ),
    CONTENT_RANGE: (
        "Content-Range",
        'Position of the chunk in its file: "bytes 0-8388607/20971520". Left out: the whole file.',
    ),
}
SECURITY_SCHEMES: Json = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key, `ls-<id>_<secret>`; also accepted in the header `x-api-key`. With a key for all "
        "tenants (`*`), the header `X-Tenant` selects the one to act for. A server without any key requires none.",
    },
}


def heeds(*names: str) -> Json:
    """For a route's `opt`: the headers that it reads."""
    return {HEEDS: names}


def document_operations(document: Json, routes: Iterable[HTTPRouteHandler]) -> None:
    """Modifies the document in place."""
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
                    operation["responses"]["304"] = {"description": "The client's copy is current."}


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

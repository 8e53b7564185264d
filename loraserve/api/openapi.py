"""The OpenAPI document. Bodies are decoded by hand (strictly), so they are described here, from the same structs."""

from dataclasses import dataclass
from typing import Any, cast

import msgspec
from litestar import Litestar
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import OpenAPIMediaType, Operation, Reference, RequestBody, Schema

from loraserve.api.errors import ErrorResponse
from loraserve.api.identity import server_version

REF_TEMPLATE = "#/components/schemas/{name}"

_ERRORS = {
    400: "The request is refused; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The origin, the host or the operation is not allowed.",
    404: "The model or adapter does not exist.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "Too much is waiting. `retry-after` says when to try again.",
    431: "The URL and headers are too large.",
    500: "The server failed.",
    503: "The engine is not running, or the server is shutting down.",
}

ERROR_RESPONSES = {
    status: ResponseSpec(ErrorResponse, description=text, generate_examples=False) for status, text in _ERRORS.items()
}
"""Of every route that runs something."""


def json_body(body: type[msgspec.Struct]) -> type[Operation]:
    """An operation whose required body is `body`."""

    @dataclass
    class JsonBodyOperation(Operation):
        def __post_init__(self) -> None:
            schema = Reference(ref=REF_TEMPLATE.format(name=body.__name__))
            self.request_body = RequestBody({"application/json": OpenAPIMediaType(schema=schema)}, required=True)

    return JsonBodyOperation


def openapi_config() -> OpenAPIConfig:
    """Served at /schema/openapi.json. No documentation pages: they would load scripts from elsewhere."""
    return OpenAPIConfig(
        title="loraserve",
        version=server_version(),
        description="Many LoRA adapters over one base model, behind OpenAI's API.",
        path="/schema",
        render_plugins=[JsonRenderPlugin()],
        use_handler_docstrings=True,
    )


def describe_bodies(app: Litestar, bodies: list[type[msgspec.Struct]]) -> None:
    """Add what `json_body` refers to. Litestar builds the other schemas itself, from the handlers' annotations."""
    _, schemas = msgspec.json.schema_components(bodies, ref_template=REF_TEMPLATE)
    components = app.openapi_schema.components.schemas
    assert components is not None
    # Litestar renders dicts as they are.
    components.update(cast(dict[str, Schema], cast(Any, schemas)))

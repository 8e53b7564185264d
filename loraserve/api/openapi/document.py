"""The OpenAPI document. Handlers decode bodies themselves (strictly), so bodies are described here, from the same
structs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Router
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    Reference,
    RequestBody,
    Schema,
)

from loraserve.api.http.errors import ErrorResponse
from loraserve.api.inference.identity import server_version
from loraserve.api.openapi.operation_docs import document_operations
from loraserve.api.openapi.schema_docs import document_schemas
from loraserve.api.schemas.lorax import LoraxError
from loraserve.api.schemas.message_answer import MessageError

REF_TEMPLATE = "#/components/schemas/{name}"

_ERRORS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The key's role, the tenant's state, the origin or the host does not allow it.",
    404: "It does not exist, or it belongs to another tenant.",
    405: "The method is not allowed here.",
    409: "Its state does not allow this, or it was changed at the same time.",
    412: "A condition in If-Match or If-None-Match is not met.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "A limit is reached. The header `retry-after` says when to retry.",
    431: "The URL and headers are too large.",
    500: "The server failed.",
    503: "The engine or Redis is not running, or the server is shutting down.",
}

ERROR_RESPONSES = {
    status: ResponseSpec(ErrorResponse, description=text, generate_examples=False) for status, text in _ERRORS.items()
}
"""Error responses of every route with errors in OpenAI's format, except the health checks."""


def answered_with(
    answer: Any, errors: dict[int, ResponseSpec] = ERROR_RESPONSES, *, may_stream: bool = True
) -> dict[int, ResponseSpec]:
    """Responses of a route whose return annotation does not give the type, because it may also return a stream. answer:
    the type."""
    text = "The answer or, with `stream`, its chunks as server-sent events." if may_stream else "The answer."
    return {200: ResponseSpec(answer, description=text, generate_examples=False), **errors}


def lorax_error_responses() -> dict[int, ResponseSpec]:
    texts = {
        401: _ERRORS[401],
        403: _ERRORS[403],
        413: _ERRORS[413],
        415: _ERRORS[415],
        422: "The request is invalid.",
        424: "The generation failed, or there is no such adapter.",
        429: _ERRORS[429],
        431: _ERRORS[431],
        500: "The generation was cut short.",
        503: _ERRORS[503],
    }
    return {
        status: ResponseSpec(LoraxError, description=text, generate_examples=False) for status, text in texts.items()
    }


def message_error_responses() -> dict[int, ResponseSpec]:
    """In the format of Anthropic's API."""
    return {
        status: ResponseSpec(MessageError, description=text, generate_examples=False)
        for status, text in (_ERRORS | {400: "The request is invalid; the message names the field."}).items()
    }


def json_body(body: type[msgspec.Struct], *, required: bool = True) -> type[Operation]:
    """An operation with `body` as its JSON body."""

    @dataclass
    class JsonBodyOperation(Operation):
        def __post_init__(self) -> None:
            schema = Reference(ref=REF_TEMPLATE.format(name=body.__name__))
            self.request_body = RequestBody({"application/json": OpenAPIMediaType(schema=schema)}, required=required)

    return JsonBodyOperation


def binary_body() -> type[Operation]:
    """An operation whose body is a file or a part of one."""
    return _body_of("application/octet-stream", Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY))


def multipart_body() -> type[Operation]:
    """An operation whose body is a form with an adapter's files."""
    file = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
    form = Schema(
        type=OpenAPIType.OBJECT,
        properties={
            "name": Schema(type=OpenAPIType.STRING, description="Name of the adapter."),
            "activate": Schema(type=OpenAPIType.BOOLEAN, default=True),
            "files": Schema(
                type=OpenAPIType.ARRAY,
                items=file,
                description="adapter_config.json and adapter_model.safetensors, under these file names.",
            ),
        },
        required=["name", "files"],
    )
    return _body_of("multipart/form-data", form)


def _body_of(media_type: str, schema: Schema) -> type[Operation]:
    @dataclass
    class BodyOperation(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody({media_type: OpenAPIMediaType(schema=schema)}, required=True)

    return BodyOperation


class _CompletePlugin(JsonRenderPlugin):
    """Serves the complete document, built on request."""

    def __init__(self, render: Callable[[dict[str, Any]], bytes]) -> None:
        super().__init__()
        self._render = render

    def render(self, request: Request, openapi_schema: dict[str, Any]) -> bytes:
        return self._render(openapi_schema)


def openapi_config(router: Router, render: Callable[[dict[str, Any]], bytes]) -> OpenAPIConfig:
    """Served at /schema/openapi.json. No documentation pages: they would load scripts from elsewhere.

    render: see `render_document`.
    """
    return OpenAPIConfig(
        title="loraserve",
        version=server_version(),
        description="Many LoRA adapters over one base model, behind OpenAI's API.",
        path="/schema",
        openapi_router=router,
        render_plugins=[_CompletePlugin(render)],
        use_handler_docstrings=True,
    )


def render_document(
    document: dict[str, Any], bodies: Iterable[type[msgspec.Struct]], routes: Iterable[HTTPRouteHandler]
) -> bytes:
    """Completes Litestar's document, which describes only the answers, from the handlers' annotations.

    bodies: the types given to `json_body`.
    """
    _, schemas = msgspec.json.schema_components(bodies, ref_template=REF_TEMPLATE)
    components = document["components"]["schemas"] | schemas
    document_schemas(components)
    # Litestar keeps a handler's paths in a set, whose order differs between processes.
    paths = dict(sorted(document["paths"].items()))
    document = {**document, "paths": paths, "components": {**document["components"], "schemas": components}}
    for operations in document["paths"].values():
        for operation in operations.values():
            # For a handler that returns a `Response` with cookies, Litestar describes a body for status 204.
            operation["responses"].get("204", {}).pop("content", None)
    document_operations(document, routes)
    return msgspec.json.encode(document)

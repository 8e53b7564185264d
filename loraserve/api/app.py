"""The HTTP application."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from litestar import Litestar
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, ControllerRouterHandler

from loraserve.api.app_context import AppContext
from loraserve.api.auth import api_key_guard
from loraserve.api.errors import handle_exception, handle_http_exception, handle_serving_error
from loraserve.api.front_door import FrontDoor
from loraserve.api.openapi import describe_bodies, openapi_config
from loraserve.api.processing_time import add_processing_time
from loraserve.api.request_id import add_request_id
from loraserve.api.routes import adapters, chat, completions, health, metrics, models, tokenize
from loraserve.api.schemas.adapters import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from loraserve.api.schemas.chat import ChatCompletionRequest
from loraserve.api.schemas.completions import CompletionRequest
from loraserve.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from loraserve.api.state import put_runtime
from loraserve.serving.errors import ServingError
from loraserve.serving.runtime import Runtime
from loraserve.serving.settings import ServingSettings

ROUTES: list[ControllerRouterHandler] = [
    models.list_models,
    models.get_model,
    models.list_adapter_models,
    models.get_adapter_model,
    completions.create_completion,
    completions.create_adapter_completion,
    chat.create_chat_completion,
    chat.create_adapter_chat_completion,
    tokenize.tokenize,
    tokenize.detokenize,
    adapters.load_lora_adapter,
    adapters.unload_lora_adapter,
    health.health,
    health.ping,
    health.health_live,
    health.health_ready,
    health.get_version,
    metrics.metrics,
]

BODIES: list[type[msgspec.Struct]] = [
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
]


def create_app(runtime: Runtime) -> ASGIApp:
    """An app that serves `runtime`, on the event loop that built it. It neither starts nor stops the engine."""
    context = AppContext.of(runtime)
    app = _litestar(lambda: context, runtime.settings)
    put_runtime(app, runtime)
    return FrontDoor(app, runtime)


def openapi_document() -> bytes:
    """What /schema/openapi.json answers on every server; nothing in it depends on the model."""

    def no_context() -> AppContext:
        raise AssertionError("nothing is served")

    app = _litestar(no_context, ServingSettings(served_model_names=[], data_dir=Path()))
    return msgspec.json.format(msgspec.json.encode(app.openapi_schema.to_schema()), indent=2) + b"\n"


def _litestar(provide_context: Callable[[], AppContext], settings: ServingSettings) -> Litestar:
    app = Litestar(
        ROUTES,
        dependencies={"context": Provide(provide_context, sync_to_thread=False)},
        guards=[api_key_guard(settings.api_keys)] if settings.api_keys else [],
        before_send=[add_request_id, add_processing_time],
        exception_handlers={
            ServingError: handle_serving_error,
            HTTPException: handle_http_exception,
            Exception: handle_exception,
        },
        request_max_body_size=settings.limits.max_body_bytes,
        openapi_config=openapi_config(),
        logging_config=None,
        debug=False,
    )
    describe_bodies(app, BODIES)
    return app

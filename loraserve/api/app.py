"""The HTTP application."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from litestar import Litestar, Router
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, ControllerRouterHandler
from litestar.types import Guard as GuardFunction

from loraserve.api.app_context import AppContext
from loraserve.api.auth import Credentials, Guard, KeyCredentials
from loraserve.api.errors import handle_error
from loraserve.api.front_door import FrontDoor
from loraserve.api.needs import ANY_KEY, check_all_need
from loraserve.api.openapi import openapi_config, render_document
from loraserve.api.processing_time import add_processing_time
from loraserve.api.refusal_notes import note_refusal
from loraserve.api.request_id import add_request_id
from loraserve.api.routes import (
    adapters,
    aliases,
    audit,
    certificates,
    chat,
    completions,
    config,
    health,
    keys,
    live,
    lorax,
    metrics,
    models,
    requests,
    series,
    session,
    tenants,
    tokenize,
    ui,
    uploads,
    usage,
    versions,
    vllm_adapters,
)
from loraserve.api.schemas.adapters import (
    LoadLoraAdapterRequest,
    PatchAdapterRequest,
    PinRequest,
    UnloadLoraAdapterRequest,
)
from loraserve.api.schemas.aliases import PutAliasRequest, RollbackRequest
from loraserve.api.schemas.chat import ChatCompletionRequest
from loraserve.api.schemas.completions import CompletionRequest
from loraserve.api.schemas.keys import CreateKeyRequest, PatchKeyRequest, RotateKeyRequest
from loraserve.api.schemas.lorax import LoraxRequest
from loraserve.api.schemas.session import CreateLinkRequest, CreateSessionRequest
from loraserve.api.schemas.tenants import CreateTenantRequest, PatchTenantRequest
from loraserve.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from loraserve.api.schemas.uploads import CreateUploadRequest
from loraserve.api.session_cookie import CookieCredentials
from loraserve.api.state import put_runtime
from loraserve.serving.errors import ServingError
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
    lorax.generate_as_asked,
    lorax.generate,
    lorax.generate_stream,
    lorax.get_info,
    adapters.list_adapters,
    adapters.get_adapter,
    adapters.patch_adapter,
    adapters.delete_adapter,
    adapters.restore_adapter,
    versions.list_versions,
    versions.get_version,
    versions.get_report,
    versions.get_file,
    versions.delete_version,
    certificates.get_certificate,
    aliases.put_alias,
    aliases.delete_alias,
    aliases.roll_back,
    aliases.pin_adapter,
    aliases.unpin_adapter,
    uploads.add_adapter,
    uploads.create_upload,
    uploads.put_file,
    uploads.commit_upload,
    uploads.get_upload,
    uploads.list_uploads,
    uploads.abort_upload,
    vllm_adapters.load_lora_adapter,
    vllm_adapters.unload_lora_adapter,
    keys.list_keys,
    keys.get_key,
    keys.create_key,
    keys.patch_key,
    keys.revoke_key,
    keys.rotate_key,
    tenants.list_tenants,
    tenants.get_tenant,
    tenants.create_tenant,
    tenants.patch_tenant,
    live.get_live,
    live.list_engines,
    series.get_series,
    requests.list_requests,
    requests.get_request,
    requests.abort_request,
    usage.get_usage,
    audit.list_audit,
    config.get_config,
    session.create_session,
    session.get_session,
    session.delete_session,
    session.create_link,
    ui.ui_index,
    ui.ui_file,
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
    LoraxRequest,
    PatchAdapterRequest,
    PinRequest,
    PutAliasRequest,
    RollbackRequest,
    CreateUploadRequest,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
    CreateKeyRequest,
    PatchKeyRequest,
    RotateKeyRequest,
    CreateTenantRequest,
    PatchTenantRequest,
    CreateSessionRequest,
    CreateLinkRequest,
]


def create_app(context: AppContext) -> ASGIApp:
    """An app that serves `context`, on the event loop that built it. It starts and stops nothing."""
    control = context.control
    credentials: list[Credentials] = [CookieCredentials(control.sessions), KeyCredentials(control.authenticator)]
    app = _litestar(
        lambda: context, context.runtime.settings, [Guard(credentials, note_refusal(control.observer.refusals))]
    )
    put_runtime(app, context.runtime)
    return FrontDoor(app, context.runtime, context.control.authenticator)


def openapi_document() -> bytes:
    """What /schema/openapi.json answers on every server; nothing in it depends on the model."""

    def no_context() -> AppContext:
        raise AssertionError("nothing is served")

    app = _litestar(no_context, ServingSettings(served_model_names=[], data_dir=Path()), [])
    return msgspec.json.format(render_document(app.openapi_schema.to_schema(), BODIES), indent=2) + b"\n"


def _litestar(
    provide_context: Callable[[], AppContext], settings: ServingSettings, guards: list[GuardFunction]
) -> Litestar:
    check_all_need(ROUTES)
    return Litestar(
        ROUTES,
        dependencies={"context": Provide(provide_context, sync_to_thread=False)},
        guards=guards,
        before_send=[add_request_id, add_processing_time],
        exception_handlers={ServingError: handle_error, HTTPException: handle_error, Exception: handle_error},
        request_max_body_size=settings.limits.max_body_bytes,
        openapi_config=openapi_config(Router("/schema", route_handlers=[], opt=ANY_KEY), BODIES),
        logging_config=None,
        debug=False,
    )

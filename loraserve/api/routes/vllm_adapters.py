"""vLLM's POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with its status codes and texts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
from litestar import MediaType, Request, post
from litestar.di import NamedDependency
from loraserve_adapters.base_names import is_base_name
from loraserve_adapters.errors import shown_name

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.needs import needs
from loraserve.api.http.request_id import request_id_of
from loraserve.api.openapi.document import ERROR_RESPONSES, json_body
from loraserve.api.schemas.adapters import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from loraserve.control.documents.catalog import Catalog
from loraserve.control.ingest.report import AdapterRejectedError
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.control.uploads.source import FollowLinks
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.records import SHARED_TENANT

LOAD_DECODER = msgspec.json.Decoder(LoadLoraAdapterRequest, strict=True)
UNLOAD_DECODER = msgspec.json.Decoder(UnloadLoraAdapterRequest, strict=True)


@post(
    "/v1/load_lora_adapter",
    opt=needs(Action.ADMINISTER),
    status_code=200,
    media_type=MediaType.TEXT,
    operation_class=json_body(LoadLoraAdapterRequest),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def load_lora_adapter(request: Request, context: NamedDependency[AppContext]) -> str:
    """Copy an adapter folder from the server's machine, validate it and make it what the name refers to."""
    body = await decode_body(request, LOAD_DECODER)
    name = body.lora_name
    _check_allowed(context)
    _check_given("lora_name", name)
    _check_given("lora_path", body.lora_path)
    _check_base(context, body.base_model_name)
    context.control.versions.check_name(name, "lora_name")
    principal = _owner(context, principal_of(request), name)
    async with context.loads.take(f"{principal.acting_tenant}/{name}"):
        if not body.load_inplace and _exists(context.control.catalog, principal.acting_tenant, name):
            message = f"The lora adapter '{name}' has already been loaded. Set load_inplace to replace it."
            raise ServingError(ErrorCode.ADAPTER_ALREADY_LOADED, message, param="lora_name")
        await _load(context, principal, request_id_of(request.scope), name, body.lora_path)
    return f"Success: LoRA adapter '{name}' added successfully."


@post(
    "/v1/unload_lora_adapter",
    opt=needs(Action.ADMINISTER),
    status_code=200,
    media_type=MediaType.TEXT,
    operation_class=json_body(UnloadLoraAdapterRequest),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def unload_lora_adapter(request: Request, context: NamedDependency[AppContext]) -> str:
    """Hide an adapter at once, and unload it when the requests that use it have finished."""
    body = await decode_body(request, UNLOAD_DECODER)
    _check_allowed(context)
    _check_given("lora_name", body.lora_name)
    principal = _owner(context, principal_of(request), body.lora_name)
    with _report_as_lora_name():
        await context.control.adapters.delete(principal, request_id_of(request.scope), body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


async def _load(context: AppContext, principal: Principal, request_id: str, name: str, path: str) -> None:
    roots = _roots(context, principal)
    may_be_anywhere = roots is None
    try:
        await context.control.uploads.from_path(
            principal,
            request_id,
            name,
            _expanded(path) if may_be_anywhere else Path(path),
            roots=roots,
            follow_links=FollowLinks.IN_OWN_FOLDERS if may_be_anywhere else FollowLinks.NEVER,
        )
    except AdapterRejectedError as error:
        message = f"Loading lora failed: {error.report.summary}."
        raise ServingError(ErrorCode.ADAPTER_INVALID, message, param="lora_path") from error


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # The home directory is unknown.
        return Path(path)


def _check_base(context: AppContext, base_model_name: str | None) -> None:
    settings = context.runtime.settings
    if base_model_name and not is_base_name(base_model_name, settings.base_names):
        message = f"is '{shown_name(base_model_name)}', but this server has '{settings.served_model_names[0]}': "
        raise invalid_value("base_model_name", f"{message}use a server with that model, or leave the name out.")


@contextmanager
def _report_as_lora_name() -> Iterator[None]:
    """Reports an error about `name` as one about the field in which the request sent it."""
    try:
        yield
    except ServingError as error:
        if error.param != "name":
            raise
        renamed = error.copy()
        renamed.param = "lora_name"
        raise renamed from error


def _roots(context: AppContext, principal: Principal) -> list[Path] | None:
    """Folders that the path must be in; None = anywhere."""
    settings = context.runtime.settings
    if principal.is_open and settings.has_free_paths:
        return None
    if not settings.adapter_roots:
        message = "This server has no folders that paths may be in: start it with --adapter-roots."
        raise ServingError(ErrorCode.FORBIDDEN, message)
    return settings.adapter_roots


def _owner(context: AppContext, principal: Principal, name: str) -> Principal:
    """A key for all tenants (`*`) also reaches adapters loaded on the command line, which belong to `shared`."""
    catalog, tenant = context.control.catalog, principal.acting_tenant
    if principal.is_any_tenant and not _exists(catalog, tenant, name) and _exists(catalog, SHARED_TENANT, name):
        return replace(principal, acting_tenant=SHARED_TENANT)
    return principal


def _exists(catalog: Catalog, tenant: str, name: str) -> bool:
    document = catalog.adapter(tenant, name)
    return document is not None and document.doc.deleted_at is None


def _check_allowed(context: AppContext) -> None:
    if not context.runtime.settings.allow_runtime_lora:
        message = "Loading and unloading adapters at run time is switched off on this server."
        raise ServingError(ErrorCode.FORBIDDEN, message)


def _check_given(param: str, value: str) -> None:
    if not value:
        raise invalid_value(param, "is empty.")
    if "\0" in value:
        raise invalid_value(param, "contains a null character.")

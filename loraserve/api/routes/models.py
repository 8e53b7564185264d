"""GET /v1/models."""

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.openapi import ERROR_RESPONSES
from loraserve.api.schemas.models import AdapterCard, ModelCard, ModelList, ModelPermission
from loraserve.api.target import resolve_target
from loraserve.serving.engine_errors import model_not_found
from loraserve.serving.registry import ResolvedAdapter
from loraserve.serving.runtime import Runtime

OWNER = "loraserve"


@get("/v1/models", responses=ERROR_RESPONSES, tags=["models"])
async def list_models(context: NamedDependency[AppContext]) -> ModelList:
    """The base model under each of its names, then the adapters."""
    runtime = context.runtime
    base = [_base_card(context, name) for name in runtime.settings.served_model_names]
    return ModelList(base + [_adapter_card(runtime, adapter) for adapter in runtime.registry.list()])


@get("/v1/models/{model_id:path}", responses=ERROR_RESPONSES, tags=["models"])
async def get_model(context: NamedDependency[AppContext], model_id: FromPath[str]) -> ModelCard:
    """Model names may contain slashes."""
    return _card(context, model_id.removeprefix("/"))


@get("/adapters/{adapter:str}/v1/models", responses=ERROR_RESPONSES, tags=["models"])
async def list_adapter_models(context: NamedDependency[AppContext], adapter: FromPath[str]) -> ModelList:
    """The one adapter that this base URL serves."""
    return ModelList([_adapter_card(context.runtime, _adapter(context.runtime, adapter))])


@get("/adapters/{adapter:str}/v1/models/{model_id:path}", responses=ERROR_RESPONSES, tags=["models"])
async def get_adapter_model(
    context: NamedDependency[AppContext], adapter: FromPath[str], model_id: FromPath[str]
) -> ModelCard:
    """Only the adapter itself is found here."""
    resolved = _adapter(context.runtime, adapter)
    if resolve_target(context.runtime, model_id.removeprefix("/")).adapter != resolved:
        raise model_not_found(model_id.removeprefix("/"))
    return _adapter_card(context.runtime, resolved)


def _card(context: AppContext, name: str) -> ModelCard:
    target = resolve_target(context.runtime, name)
    return _base_card(context, name) if target.adapter is None else _adapter_card(context.runtime, target.adapter)


def _adapter(runtime: Runtime, name: str) -> ResolvedAdapter:
    adapter = runtime.registry.resolve(name)
    if adapter is None:
        raise model_not_found(name)
    return adapter


def _base_card(context: AppContext, name: str) -> ModelCard:
    model = context.runtime.engine.model
    return ModelCard(
        id=name,
        created=context.started,
        owned_by=OWNER,
        root=context.runtime.settings.served_model_names[0],
        parent=None,
        max_model_len=model.max_model_len,
        permission=[ModelPermission(f"modelperm-{model.layout.fingerprint[:32]}", context.started)],
    )


def _adapter_card(runtime: Runtime, adapter: ResolvedAdapter) -> ModelCard:
    return ModelCard(
        id=adapter.name,
        created=adapter.created,
        owned_by=OWNER,
        root=adapter.digest,
        parent=runtime.settings.served_model_names[0],
        max_model_len=None,
        permission=[ModelPermission(f"modelperm-{adapter.digest[:32]}", adapter.created)],
        adapter=AdapterCard(rank=adapter.max_lora_rank, size_bytes=adapter.size_bytes, digest=adapter.digest),
    )

"""GET /v1/models."""

from collections.abc import Sequence
from urllib.parse import unquote

from litestar import Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import UNSET, UnsetType

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.needs import ANY_KEY
from loraserve.api.management.adapter_items import classifier_item
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.schemas.models import AdapterCard, ModelCard, ModelList, ModelPermission
from loraserve.api.schemas.versions import ClassifierItem, InvocationItem
from loraserve.control.documents.adapter_edits import live_version
from loraserve.control.names.resolve import ResolvedAdapter
from loraserve.serving.engine_errors import model_not_found
from loraserve.store.records import ClassifierRecord

OWNER = "loraserve"


@get("/v1/models", opt=ANY_KEY, responses=ERROR_RESPONSES, tags=["models"])
async def list_models(request: Request, context: NamedDependency[AppContext]) -> ModelList:
    """The base model under each of its names, then the adapters."""
    cards = [_base_card(context, name) for name in context.runtime.settings.served_model_names]
    for document in context.control.resolver.visible(principal_of(request)):
        version = live_version(document.doc)
        if version is not None:
            card = AdapterCard(
                rank=version.max_rank,
                size_bytes=version.size_bytes,
                digest=version.digest,
                version=version.n,
                invocation=_invocation(context, version.invocation_token_ids),
                classifier=_classifier(version.classifier, with_names=False),
                chat_template=version.chat_template or UNSET,
            )
            cards.append(_card(context, document.doc.name, card, int(version.created_at)))
    return ModelList(cards)


@get("/v1/models/{model_id:path}", opt=ANY_KEY, responses=ERROR_RESPONSES, tags=["models"])
async def get_model(request: Request, context: NamedDependency[AppContext], model_id: FromPath[str]) -> ModelCard:
    """One model. Names of the base model may contain slashes; an adapter's name may include a version or an alias."""
    name = _requested_name(request, context)
    target = await context.control.resolver.resolve_newest(principal_of(request), name)
    if target.adapter is None:
        return _base_card(context, name)
    for base_name in context.runtime.settings.served_model_names:
        name = name.removeprefix(f"{base_name}:")
    return _adapter_card(context, name, target.adapter)


@get("/adapters/{adapter:str}/v1/models", opt=ANY_KEY, responses=ERROR_RESPONSES, tags=["models"])
async def list_adapter_models(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str]
) -> ModelList:
    """The one adapter that this base URL serves."""
    resolved = await _in_path(request, context, adapter)
    return ModelList([_adapter_card(context, adapter, resolved)])


@get("/adapters/{adapter:str}/v1/models/{model_id:path}", opt=ANY_KEY, responses=ERROR_RESPONSES, tags=["models"])
async def get_adapter_model(
    request: Request, context: NamedDependency[AppContext], adapter: FromPath[str], model_id: FromPath[str]
) -> ModelCard:
    """The adapter that this base URL serves; any other model gives 404."""
    name = _requested_name(request, context)
    resolved = await _in_path(request, context, adapter)
    target = await context.control.resolver.resolve_newest(principal_of(request), name)
    if target.adapter is None or target.adapter.digest != resolved.digest:
        raise model_not_found(name)
    return _adapter_card(context, adapter, resolved)


def _requested_name(request: Request, context: AppContext) -> str:
    """From the path as sent: names that are paths may begin or end with a slash, which routing drops."""
    name = unquote(request.scope["raw_path"]).partition("/v1/models/")[2]
    served_names = context.runtime.settings.served_model_names
    is_of_base = name in served_names or name.startswith(tuple(f"{base_name}:" for base_name in served_names))
    return name if is_of_base else name.strip("/")


async def _in_path(request: Request, context: AppContext, adapter: str) -> ResolvedAdapter:
    target = await context.control.resolver.resolve_newest(principal_of(request), None, path_adapter=adapter)
    if target.adapter is None:
        raise model_not_found(adapter)
    return target.adapter


def _base_card(context: AppContext, name: str) -> ModelCard:
    model, settings = context.runtime.engine.model, context.runtime.settings
    return ModelCard(
        id=name,
        created=context.started,
        owned_by=OWNER,
        root=settings.served_model_names[0],
        parent=None,
        max_model_len=model.max_model_len,
        permission=[ModelPermission(f"modelperm-{model.layout.fingerprint[:32]}", context.started)],
        adapter_chat_templates=[template.name for template in settings.adapter_chat_templates] or UNSET,
    )


def _adapter_card(context: AppContext, name: str, adapter: ResolvedAdapter) -> ModelCard:
    card = AdapterCard(
        rank=adapter.max_lora_rank,
        size_bytes=adapter.size_bytes,
        digest=adapter.digest,
        version=adapter.version,
        invocation=_invocation(context, adapter.invocation_token_ids),
        classifier=_classifier(adapter.classifier, with_names=True),
        chat_template=adapter.chat_template or UNSET,
    )
    return _card(context, name, card, adapter.created)


def _invocation(context: AppContext, token_ids: Sequence[int]) -> InvocationItem | UnsetType:
    """For a version that fits the served base model."""
    return InvocationItem([*token_ids], context.runtime.tokenizer.decode_few(token_ids)) if token_ids else UNSET


def _classifier(classifier: ClassifierRecord | None, *, with_names: bool) -> ClassifierItem | UnsetType:
    if classifier is None:
        return UNSET
    return classifier_item(classifier) if with_names else ClassifierItem(classifier.num_labels, classifier.problem_type)


def _card(context: AppContext, name: str, adapter: AdapterCard, created: int) -> ModelCard:
    return ModelCard(
        id=name,
        created=created,
        owned_by=OWNER,
        root=adapter.digest,
        parent=context.runtime.settings.served_model_names[0],
        max_model_len=None,
        permission=[ModelPermission(f"modelperm-{adapter.digest[:32]}", created)],
        adapter=adapter,
    )

"""Which adapter, at which version, a model name means. An unknown name is an error, never the base model."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from loraserve.control.documents.adapter_edits import find_version, live_version, version_of
from loraserve.control.documents.catalog import Catalog
from loraserve.control.names.served_base import check_fits, fits
from loraserve.control.tenancy.principal import Principal
from loraserve.serving.engine_errors import model_not_found
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.names import AdapterRef, BaseRef, parse_model_ref
from loraserve.store.records import (
    SHARED_TENANT,
    AdapterDoc,
    BaseRecord,
    Canary,
    ClassifierRecord,
    Document,
    DocumentKind,
    adapter_id,
)

MAX_SHOWN_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """A name bound to content. A request keeps what it was bound to, whatever happens to the name."""

    tenant: str
    """Its owner: the acting tenant or `shared`."""
    name: str
    version: int
    digest: str
    alias: str | None
    """None if the version was requested by number."""
    adapter_rev: int
    """Revision of the adapter's document."""
    max_lora_rank: int
    size_bytes: int
    created: int
    """When the version was created; Unix time."""
    invocation_token_ids: tuple[int, ...] = ()
    """See `VersionRecord`."""
    classifier: ClassifierRecord | None = None
    """Likewise."""
    chat_template: str | None = None
    """Likewise."""

    @property
    def document_id(self) -> str:
        return adapter_id(self.tenant, self.name)


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    """What responses echo as `model`."""
    adapter: ResolvedAdapter | None
    """None = the base model."""
    user: str
    """The user for whom a canary is sticky; random if the request names none."""
    model: str | None
    """As requested."""
    path_adapter: str | None = None
    """Likewise."""


class Resolver:
    """Called on the event loop."""

    def __init__(self, catalog: Catalog, base: BaseRecord, served_names: Sequence[str]) -> None:
        """served_names: those by which requests ask for the base."""
        self._catalog = catalog
        self._base = base
        self._served_names = served_names

    async def resolve(
        self, principal: Principal, model: str | None, *, path_adapter: str | None = None, user: str | None = None
    ) -> Target:
        """model: `name`, `name@v3`, `name@alias`, `base:name` or the base's name. user: for canaries.

        path_adapter: from a per-adapter base URL. `model` is then missing, empty, or must mean the same adapter; it may
        name a version if the URL names none.

        Raises `ServingError`: the same 404 if it is missing, deleted, another tenant's or not on the key's list; 403
        for a disabled adapter that the principal may see, 409 for a version that was made for another base.
        """
        user = user or secrets.token_hex(16)
        if path_adapter is not None:
            in_path = await self._bind(principal, path_adapter, user)
            if in_path is None:
                raise model_not_found(path_adapter[:MAX_SHOWN_CHARACTERS])
            if not model:
                return Target(in_path.name, in_path, user, model, path_adapter)
            bound = await self._bind(principal, model, user)
            if bound is None or not _agree(path_adapter, in_path, bound):
                raise invalid_value("model", f"is {model!r}, but the URL names the adapter '{path_adapter}'.")
            return Target(model, bound, user, model, path_adapter)
        if not model:
            message = "'model' is missing. Name the base model or an adapter; GET /v1/models lists them."
            raise ServingError(ErrorCode.MISSING_PARAMETER, message, param="model")
        return Target(model, await self._bind(principal, model, user), user, model)

    async def resolve_newest(
        self, principal: Principal, model: str | None, *, path_adapter: str | None = None, user: str | None = None
    ) -> Target:
        """As `resolve`, including whatever any server committed before this call: for answers that do not depend on an
        admission, which would notice that the adapter has changed."""
        for name in filter(None, (model, path_adapter)):
            ref = parse_model_ref(name, self._served_names)
            if isinstance(ref, AdapterRef):
                for tenant in (principal.acting_tenant, SHARED_TENANT):
                    await self._catalog.reread(DocumentKind.ADAPTER, adapter_id(tenant, ref.name))
        return await self.resolve(principal, model, path_adapter=path_adapter, user=user)

    async def resolve_again(self, principal: Principal, target: Target) -> Target:
        """Resolve the same request again, as of now. Raises `ServingError`."""
        return await self.resolve(principal, target.model, path_adapter=target.path_adapter, user=target.user)

    def visible(self, principal: Principal) -> list[Document[AdapterDoc]]:
        """For /v1/models: enabled adapters whose live version fits, by name; a tenant's own hide shared ones."""
        found: dict[str, Document[AdapterDoc]] = {}
        for tenant in (SHARED_TENANT, principal.acting_tenant):
            found.update({a.doc.name: a for a in self._catalog.adapters(tenant) if _is_there(a)})
        return [
            document
            for name, document in sorted(found.items())
            if principal.may_use(name) and document.doc.enabled and self._has_fitting_live(document.doc)
        ]

    def _has_fitting_live(self, doc: AdapterDoc) -> bool:
        live = live_version(doc)
        return live is not None and fits(live, self._base)

    async def _bind(self, principal: Principal, model: str, user: str) -> ResolvedAdapter | None:
        """None = the base model."""
        ref = parse_model_ref(model, self._served_names)
        if isinstance(ref, BaseRef):
            return None
        shown = model[:MAX_SHOWN_CHARACTERS]
        if ref is None or not await self._may_use(principal, ref.name):
            raise model_not_found(shown)
        try:
            return self._bind_known(principal, ref, shown, user)
        except ServingError:
            # Another process may have created or changed it a moment ago.
            for tenant in (principal.acting_tenant, SHARED_TENANT):
                await self._catalog.try_refresh(DocumentKind.ADAPTER, adapter_id(tenant, ref.name))
            return self._bind_known(principal, ref, shown, user)

    async def _may_use(self, principal: Principal, name: str) -> bool:
        """Also by a revision of its key that is newer than the principal, which admission will notice."""
        if principal.may_use(name) or principal.key_id is None:
            return principal.may_use(name)
        await self._catalog.try_refresh(DocumentKind.KEY, principal.key_id)
        key = self._catalog.key(principal.key_id)
        return key is not None and (key.doc.adapters is None or name in key.doc.adapters)

    def _bind_known(self, principal: Principal, ref: AdapterRef, shown: str, user: str) -> ResolvedAdapter:
        document = self._find_known(principal, ref.name)
        if document is None:
            raise model_not_found(shown)
        if not document.doc.enabled:
            message = f"The adapter '{document.doc.name}' is disabled. An operator can enable it again."
            raise ServingError(ErrorCode.FORBIDDEN, message, param="model")
        bound = _bound(document, ref, user)
        if bound is None:
            raise model_not_found(shown)
        check_fits(document.doc, version_of(document.doc, bound.version), self._base)
        return bound

    def _find_known(self, principal: Principal, name: str) -> Document[AdapterDoc] | None:
        for tenant in (principal.acting_tenant, SHARED_TENANT):
            document = self._catalog.adapter(tenant, name)
            if document is not None and _is_there(document):
                return document
        return None


def in_canary(tenant: str, name: str, canary: Canary, user: str) -> bool:
    """A user who is in the canary stays in while the weight is raised; one who is out stays out while it is lowered.

    Every part is tagged with its length, so that no two different inputs are hashed as the same bytes.
    """
    digest = hashlib.sha256()
    for part in ("loraserve canary", tenant, name, canary.salt, user):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "big") + data)
    return int.from_bytes(digest.digest(), "big") % 10_000 < canary.weight_bp


def _agree(path_adapter: str, in_path: ResolvedAdapter, in_body: ResolvedAdapter) -> bool:
    """A bare name in the URL leaves the version to the body."""
    if in_path.document_id != in_body.document_id:
        return False
    return "@" not in path_adapter or in_path.version == in_body.version


def _is_there(document: Document[AdapterDoc]) -> bool:
    return document.doc.deleted_at is None


def _bound(document: Document[AdapterDoc], ref: AdapterRef, user: str) -> ResolvedAdapter | None:
    doc = document.doc
    if ref.version is not None:
        return _resolved(document, ref.version, None)
    alias = doc.aliases.get(ref.alias)
    if alias is None:
        return None
    if alias.canary is not None and in_canary(doc.tenant, doc.name, alias.canary, user):
        return _resolved(document, alias.canary.version, ref.alias)
    return _resolved(document, alias.version, ref.alias)


def _resolved(document: Document[AdapterDoc], n: int, alias: str | None) -> ResolvedAdapter | None:
    version = find_version(document.doc, n)
    if version is None:
        return None
    return ResolvedAdapter(
        tenant=document.doc.tenant,
        name=document.doc.name,
        version=n,
        digest=version.digest,
        alias=alias,
        adapter_rev=document.rev,
        max_lora_rank=version.max_rank,
        size_bytes=version.size_bytes,
        created=int(version.created_at),
        invocation_token_ids=tuple(version.invocation_token_ids),
        classifier=version.classifier,
        chat_template=version.chat_template,
    )

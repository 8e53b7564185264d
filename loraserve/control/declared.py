"""All declared documents and Redis: the part of a server that exists before its engine."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from loraserve_adapters.rules import AdapterRules

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.declarations import Declarations
from loraserve.control.documents.outage import Outage
from loraserve.control.names.adapter_access import AdapterAccess
from loraserve.control.tenancy.authenticator import Authenticator
from loraserve.control.tenancy.keys import KeyService
from loraserve.control.tenancy.quota import Quota
from loraserve.control.tenancy.tenants import TenantService
from loraserve.live.connection import CALL_S
from loraserve.live.key_names import DEFAULT_PREFIX
from loraserve.live.live_store import LiveStore
from loraserve.store.blobs import BlobStore
from loraserve.store.documents import DocumentStore


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True):
    data_dir: Path
    redis_url: str
    redis_prefix: str = DEFAULT_PREFIX
    redis_timeout_s: float = CALL_S
    """Timeout of one call."""
    redis_grace_s: float = 60.0
    """How long requests are served without Redis; 0 = not at all."""
    served_names: list[str]
    """The names by which requests ask for the base model; the first one is shown."""
    adapter_rules: AdapterRules
    flag_keys: list[str] = []
    """API keys without a document."""
    keep_versions: int | None = None
    """Newest versions kept per adapter, besides older ones that an alias still refers to; None = all."""
    max_queued: int = 256
    """Sequences that may wait for the engine."""
    max_queued_per_tenant: int | None = None
    """For tenants without a limit of their own; None = see `QueueLimits`."""


@dataclass(frozen=True, slots=True)
class Declared:
    settings: ControlSettings
    live: LiveStore
    blobs: BlobStore
    outage: Outage
    catalog: Catalog
    declarations: Declarations
    authenticator: Authenticator
    access: AdapterAccess
    quota: Quota
    tenants: TenantService
    keys: KeyService


async def open_declared(settings: ControlSettings) -> Declared:
    """Load all documents into memory, bring Redis up to date with them and create the built-in tenants.

    Raises `LiveUnavailableError`, `LiveSchemaError`.
    """
    documents = DocumentStore(settings.data_dir)
    live = LiveStore(settings.redis_url, settings.redis_prefix, timeout_s=settings.redis_timeout_s)
    outage = Outage(settings.redis_grace_s)
    catalog = Catalog(documents, live, outage)
    declarations = Declarations(documents, live, catalog)
    quota = Quota(catalog, live, keep_versions=settings.keep_versions)
    access = AdapterAccess(catalog, declarations)
    tenants = TenantService(catalog, declarations, quota)
    declared = Declared(
        settings=settings,
        live=live,
        blobs=BlobStore(settings.data_dir),
        outage=outage,
        catalog=catalog,
        declarations=declarations,
        authenticator=Authenticator(catalog, settings.flag_keys),
        access=access,
        quota=quota,
        tenants=tenants,
        keys=KeyService(catalog, declarations),
    )
    try:
        await catalog.catch_up()
        await catalog.synchronise()
        await tenants.ensure_builtin()
    except BaseException:
        await live.close()
        raise
    return declared

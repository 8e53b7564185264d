"""The tenant-aware layer between HTTP and the engine. An app consists of this and a runtime."""

import asyncio
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from loraserve.control.adapters.aliases import AliasService
from loraserve.control.adapters.pins import Pins
from loraserve.control.adapters.service import AdapterService
from loraserve.control.adapters.versions import VersionService
from loraserve.control.background import Background
from loraserve.control.contents.certificate import Certifier
from loraserve.control.contents.loader import ContentLoader
from loraserve.control.contents.reachability import sweep_contents
from loraserve.control.contents.residency import Residency
from loraserve.control.contents.smoke import SmokeTest
from loraserve.control.contents.stored import Contents
from loraserve.control.declared import Declared
from loraserve.control.deletion.erasure import Erasure
from loraserve.control.deletion.remains import Remains
from loraserve.control.deletion.retirement import Retirement
from loraserve.control.deletion.tenant_deletion import TenantDeletionService
from loraserve.control.documents.catalog import Catalog
from loraserve.control.ingest.processes import Ingest, packed_folder
from loraserve.control.names.resolve import Resolver
from loraserve.control.names.served_base import served_base
from loraserve.control.observer import Observer, build_observer
from loraserve.control.requests.admission import Admission
from loraserve.control.requests.draining import Draining
from loraserve.control.requests.local_admission import LocalAdmission
from loraserve.control.requests.local_limits import LocalLimits
from loraserve.control.requests.other_servers import OtherServers
from loraserve.control.requests.queue_limits import QueueLimits
from loraserve.control.requests.revocation import Revocation
from loraserve.control.requests.running import RunningRequests
from loraserve.control.tenancy.authenticator import Authenticator
from loraserve.control.tenancy.keys import KeyService
from loraserve.control.tenancy.login_attempts import LoginAttempts
from loraserve.control.tenancy.sessions import SessionService
from loraserve.control.tenancy.tenants import TenantService
from loraserve.control.uploads.service import UploadService
from loraserve.control.usage.writer import UsageWriter
from loraserve.engine.config import EngineConfig
from loraserve.live.live_store import LiveStore
from loraserve.serving.engine_client import EngineClient
from loraserve.serving.runtime import Runtime
from loraserve.store.blobs import SWEEP_EVERY_S
from loraserve.store.documents import DocumentStore
from loraserve.store.durable import remove_old_folders
from loraserve.store.uploads import SPOOL, UploadStore
from loraserve.store.usage_log import UsageLog

SYNC_USAGE_EVERY_S = 1.0
SETTLE_EVERY_S = 2.0
EXPIRE_UPLOADS_EVERY_S = 60.0
STALE_OUTPUT_S = 3600.0
"""Longer than `Ingest` allows a job to run."""
STALE_FORM_S = 24 * 3600.0
"""The second file of a form may arrive hours later."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Called on the event loop. Build it with `build_control`; `start` it before the first request."""

    live: LiveStore
    catalog: Catalog
    authenticator: Authenticator
    resolver: Resolver
    admission: Admission
    ingest: Ingest
    residency: Residency
    adapters: AdapterService
    versions: VersionService
    aliases: AliasService
    tenants: TenantService
    tenant_deletion: TenantDeletionService
    erasure: Erasure
    retirement: Retirement
    keys: KeyService
    sessions: SessionService
    login_attempts: LoginAttempts
    uploads: UploadService
    contents: Contents
    background: Background
    usage_log: UsageLog
    usage_writer: UsageWriter
    revocation: Revocation
    pins: Pins
    certifier: Certifier | None
    """None: no certificates are made."""
    observer: Observer
    declared: Declared

    async def start(self) -> None:
        await self._remove_leftovers()
        await self.uploads.start()
        background = self.background
        background.run("following document changes", self.catalog.run)
        background.run("ending revoked requests", self.revocation.run)
        background.run("renewing leases", self.live.leases.renew_forever)
        background.run("keeping pinned adapters", self.pins.run)
        if self.certifier is not None:
            background.run("certifying adapters", self.certifier.run)
        self.observer.start(background)
        background.every("settling requests", SETTLE_EVERY_S, self.admission.settle_again)
        background.every("syncing the usage log", SYNC_USAGE_EVERY_S, self._sync_usage)
        background.every("expiring uploads", EXPIRE_UPLOADS_EVERY_S, self.uploads.expire)
        background.every("removing leftovers of killed servers", SWEEP_EVERY_S, self._remove_leftovers)
        background.every("erasing tenants and removing unused contents", SWEEP_EVERY_S, self.erasure.sweep)
        background.every("retiring old documents", SWEEP_EVERY_S, self.retirement.sweep)

    async def close(self) -> None:
        """Call once no request runs any more."""
        await self.uploads.close()
        await self.admission.close()
        await self.background.stop()
        self.usage_writer.close()
        await self.observer.close()
        await self.residency.close()
        await self.ingest.close()
        await self.declared.declarations.close()
        await self.catalog.close()
        await asyncio.to_thread(self.usage_log.close)
        await self.live.close()

    async def _sync_usage(self) -> None:
        self.usage_writer.retry()
        await asyncio.to_thread(self.usage_log.sync)

    async def _remove_leftovers(self) -> None:
        """Called at the start and periodically: right after a kill, leftovers are still too young to be removed."""
        await asyncio.to_thread(_remove_leftovers, self.declared.settings.data_dir)


def _remove_leftovers(data_dir: Path) -> None:
    """Remove what `Ingest.pack` and half-received forms left behind when their server was killed."""
    remove_old_folders(packed_folder(data_dir), ".*-*", STALE_OUTPUT_S)
    remove_old_folders(data_dir / SPOOL, "*", STALE_FORM_S)


def build_control(declared: Declared, runtime: Runtime, certified_engine: EngineConfig | None = None) -> ControlPlane:
    """certified_engine: the engine's configuration, if adapters are to get certificates; else None."""
    settings, catalog, engine = declared.settings, declared.catalog, runtime.engine
    process = f"{os.getpid()}-{secrets.token_hex(4)}"
    packed_dir = packed_folder(settings.data_dir)
    base = served_base(settings.served_names[0], engine.model.layout)
    resolver = Resolver(catalog, base, settings.served_names)
    versions = VersionService(
        declared.access,
        declared.declarations,
        declared.quota,
        declared.authenticator,
        base=base,
        served_names=settings.served_names,
        keep_versions=settings.keep_versions,
    )
    running = RunningRequests()
    usage_log = UsageLog(settings.data_dir, process)
    usage_writer = UsageWriter(usage_log)
    admission = _admission(declared, engine, resolver, running, usage_writer, process)
    ingest = Ingest(packed_dir=packed_dir, layout=lambda: engine.model.layout, rules=settings.adapter_rules)
    loader = ContentLoader(engine, declared.blobs, ingest, base.name)
    residency = Residency(engine, loader, catalog)
    certifier = None if certified_engine is None else _certifier(declared, engine, ingest, certified_engine)
    draining = Draining(catalog, running, residency, OtherServers(declared.live, process))
    pins = Pins(catalog, residency, engine, base)
    observer = build_observer(declared, runtime, admission, running, residency, usage_writer, process)
    revocation = Revocation(catalog, declared.authenticator, running)
    upload_store = UploadStore(settings.data_dir)
    login_attempts = LoginAttempts()
    return ControlPlane(
        live=declared.live,
        catalog=catalog,
        authenticator=declared.authenticator,
        resolver=resolver,
        admission=admission,
        ingest=ingest,
        residency=residency,
        adapters=AdapterService(declared.access, declared.quota, residency, draining, pins, base),
        versions=versions,
        aliases=AliasService(declared.access, base),
        tenants=declared.tenants,
        tenant_deletion=TenantDeletionService(catalog, declared.declarations, revocation, draining),
        erasure=_erasure(declared, engine, upload_store, packed_dir),
        retirement=Retirement(catalog, DocumentStore(settings.data_dir), declared.live, declared.authenticator),
        keys=declared.keys,
        sessions=SessionService(declared.authenticator, declared.live, login_attempts),
        login_attempts=login_attempts,
        uploads=UploadService(
            upload_store,
            declared.blobs,
            ingest,
            publisher=versions,
            quota=declared.quota,
            smoke=SmokeTest(engine, residency),
            certify=_no_certificate if certifier is None else certifier.queue,
            limits=settings.adapter_rules.limits,
        ),
        contents=Contents(declared.blobs),
        background=Background(),
        usage_log=usage_log,
        usage_writer=usage_writer,
        revocation=revocation,
        pins=pins,
        certifier=certifier,
        observer=observer,
        declared=declared,
    )


def _erasure(declared: Declared, engine: EngineClient, uploads: UploadStore, packed_dir: Path) -> Erasure:
    data_dir = declared.settings.data_dir
    return Erasure(
        declared.catalog,
        declared.declarations,
        declared.live,
        Remains(data_dir, uploads),
        lambda now: sweep_contents(data_dir, packed_dir, engine.model.layout, now),
    )


def _admission(
    declared: Declared,
    engine: EngineClient,
    resolver: Resolver,
    running: RunningRequests,
    usage: UsageWriter,
    process: str,
) -> Admission:
    settings, authenticator = declared.settings, declared.authenticator
    queues = QueueLimits(
        declared.catalog,
        running,
        engine,
        max_queued=settings.max_queued,
        max_queued_per_tenant=settings.max_queued_per_tenant,
    )
    return Admission(
        declared.catalog,
        declared.live,
        authenticator,
        resolver,
        running,
        usage,
        declared.outage,
        queues,
        LocalAdmission(declared.outage, authenticator, running, LocalLimits()),
        process=process,
    )


def _certifier(declared: Declared, engine: EngineClient, ingest: Ingest, certified_engine: EngineConfig) -> Certifier:
    return Certifier(
        declared.blobs,
        ingest,
        base_fingerprint=lambda: engine.model.layout.fingerprint,
        # The actual device, not the requested one: `auto` may mean a GPU, whose adapters must not be measured on a CPU.
        engine=replace(certified_engine, device=engine.model.device),
    )


def _no_certificate(digest: str) -> None:
    """Certificates are not enabled."""

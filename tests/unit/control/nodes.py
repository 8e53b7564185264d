"""The whole control plane of one server, on a real Redis and a data directory, with a fake engine."""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.packed_file import packed_file_name

from loraserve.control.adapters.aliases import AliasService
from loraserve.control.adapters.pins import Pins
from loraserve.control.adapters.service import AdapterService
from loraserve.control.adapters.versions import VersionService
from loraserve.control.background import cancelled
from loraserve.control.contents.loader import ContentLoader
from loraserve.control.contents.reachability import sweep_contents
from loraserve.control.contents.residency import Residency
from loraserve.control.deletion.erasure import Erasure
from loraserve.control.deletion.remains import Remains
from loraserve.control.deletion.retirement import Retirement
from loraserve.control.deletion.tenant_deletion import TenantDeletionService
from loraserve.control.documents.adapter_edits import Content
from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.declarations import Declarations
from loraserve.control.documents.outage import Outage
from loraserve.control.ingest.processes import Ingest, IngestError, packed_folder
from loraserve.control.names.adapter_access import AdapterAccess
from loraserve.control.names.labels import CatalogNames
from loraserve.control.names.resolve import Resolver
from loraserve.control.names.served_base import served_base
from loraserve.control.requests.admission import Admission
from loraserve.control.requests.admitted import Admitted
from loraserve.control.requests.draining import Draining
from loraserve.control.requests.local_admission import LocalAdmission
from loraserve.control.requests.local_limits import LocalLimits
from loraserve.control.requests.other_servers import OtherServers
from loraserve.control.requests.queue_limits import QueueLimits
from loraserve.control.requests.revocation import Revocation
from loraserve.control.requests.running import Demand, RunningRequests
from loraserve.control.requests.snapshots import Snapshots
from loraserve.control.tenancy.authenticator import Authenticator
from loraserve.control.tenancy.keys import KeyService
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.control.tenancy.quota import Quota
from loraserve.control.tenancy.tenants import TenantService
from loraserve.control.usage.outcome import Outcome
from loraserve.control.usage.writer import UsageWriter
from loraserve.live.live_store import LiveStore
from loraserve.live.requests import EndState
from loraserve.serving.engine_client import AdapterLoadError
from loraserve.serving.runtime import Runtime, build_runtime
from loraserve.serving.settings import ServingSettings
from loraserve.store.blobs import BLOB_FILES, BlobStore
from loraserve.store.documents import DocumentStore
from loraserve.store.uploads import UploadStore
from loraserve.store.usage_log import UsageLine, UsageLog
from tests.support.fake_engine_client import FakeEngine

WAIT_S = 20.0
ADMIN = server_principal("default", "cli")
ACME = server_principal("acme", "cli")
DONE = Outcome(EndState.COMPLETED, "stop", 10, 4, 6, ttft_ms=1.0)


class Clock:
    """Unix or monotonic time that only a test moves."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class TrackingEngine(FakeEngine):
    """Keeps track of the contents it was given, as the engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, str] = {}
        """Packed path by digest."""
        self.may_unload = asyncio.Event()
        self.may_unload.set()

    async def load(self, digest: str, packed_path: str) -> None:
        await super().load(digest, packed_path)
        if Path(packed_path).read_bytes() != PACKED:
            raise AdapterLoadError("the packed file is damaged")
        self.known[digest] = packed_path

    async def unload(self, digest: str) -> None:
        await self.may_unload.wait()
        await super().unload(digest)
        del self.known[digest]


PACKED = bytes(7)


class FakePacker:
    """Like `Ingest`, but writes a packed file that only a fake engine accepts."""

    def __init__(self, packed_dir: Path, layout: BaseLayout) -> None:
        self._packed_dir = packed_dir
        self._layout = layout
        self.packed: list[str] = []
        self.error: IngestError | OSError | None = None

    def packed_path(self, digest: str) -> Path:
        return self._packed_dir / packed_file_name(digest, self._layout)

    async def pack(self, digest: str, blob: Path) -> Path:
        assert blob.name == digest
        if self.error is not None:
            raise self.error
        self.packed.append(digest)
        path = self.packed_path(digest)
        path.write_bytes(PACKED)
        return path


@dataclass(slots=True)
class Node:
    documents: DocumentStore
    blobs: BlobStore
    live: LiveStore
    outage: Outage
    catalog: Catalog
    declarations: Declarations
    quota: Quota
    tenants: TenantService
    tenant_deletion: TenantDeletionService
    erasure: Erasure
    retirement: Retirement
    keys: KeyService
    versions: VersionService
    aliases: AliasService
    adapters: AdapterService
    running: RunningRequests
    residency: Residency
    snapshots: Snapshots
    """Publishes only when told to."""
    authenticator: Authenticator
    resolver: Resolver
    admission: Admission
    revocation: Revocation
    pins: Pins
    usage_log: UsageLog
    engine: TrackingEngine
    runtime: Runtime
    packer: FakePacker
    clock: Clock
    """Unix time."""
    steady: Clock
    """Monotonic time, for outages and durations."""
    data_dir: Path

    async def admit(
        self, principal: Principal, model: str = "tiny", *, reserve: int = 100, num_sequences: int = 1
    ) -> Admitted:
        target = await self.resolver.resolve(principal, model)
        demand = Demand(reserve, num_sequences)
        return await self.admission.admit(principal, target, secrets.token_hex(8), demand, self.steady())

    async def publish(self, name: str, text: str, principal: Principal = ACME, *, activate: bool = True) -> str:
        """Publish a version whose content is `text`. Returns its digest."""
        digest = self.put_blob(text)
        await self.versions.publish(principal, "r", name, content(digest), activate=activate)
        return digest

    def put_blob(self, text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()
        prepared = self.data_dir / "uploads" / secrets.token_hex(4)
        prepared.mkdir(parents=True)
        for name in BLOB_FILES:
            (prepared / name).write_text(text)
        self.blobs.publish(prepared, digest)
        return digest

    def usage_lines(self) -> list[UsageLine]:
        files = sorted((self.data_dir / "usage").glob("*/*.jsonl"))
        return [msgspec.json.decode(line, type=UsageLine) for file in files for line in file.read_bytes().splitlines()]


NUMBERS = itertools.count(1)


def content(digest: str, upload_id: str | None = None, size_bytes: int = 100) -> Content:
    return Content(digest, upload_id or f"u{next(NUMBERS)}", size_bytes, 8, ["q_proj"])


async def build_node(
    data_dir: Path,
    url: str,
    *,
    flag_keys: tuple[str, ...],
    grace_s: float,
    max_loaded: int,
    max_queued: int,
    max_queued_per_tenant: int | None,
    base_name: str,
    layout: BaseLayout | None,
    keep_versions: int | None,
) -> Node:
    """Has read all documents of the data directory, but runs nothing yet. See `running_node`."""
    data_dir.mkdir(exist_ok=True)
    clock, steady = Clock(1_000_000.0), Clock(1000.0)
    engine = TrackingEngine()
    if layout is not None:
        engine.model = dataclasses.replace(engine.model, layout=layout)
    documents, blobs = DocumentStore(data_dir), BlobStore(data_dir)
    # On a busy machine, a slow Redis must not count as an outage; a killed one is still noticed at once.
    live = LiveStore(url, timeout_s=WAIT_S)
    outage = Outage(grace_s, clock=steady)
    catalog = Catalog(documents, live, outage)
    await catalog.catch_up()
    process = f"p-{secrets.token_hex(4)}"
    packed_dir = packed_folder(data_dir)
    packer = FakePacker(packed_dir, engine.model.layout)
    declarations = Declarations(documents, live, catalog, clock=clock)
    quota = Quota(catalog, live, keep_versions=keep_versions, clock=clock)
    access = AdapterAccess(catalog, declarations)
    running = RunningRequests()
    loader = ContentLoader(engine, blobs, cast(Ingest, packer), base_name)
    residency = Residency(engine, loader, catalog, max_loaded=max_loaded, clock=clock)
    others = OtherServers(live, process)
    runtime = build_runtime(
        engine, ServingSettings(served_model_names=[base_name], data_dir=data_dir), CatalogNames(catalog)
    )
    authenticator = Authenticator(catalog, flag_keys, clock=clock)
    base = served_base(base_name, engine.model.layout)
    resolver = Resolver(catalog, base, [base_name])
    usage_log = UsageLog(data_dir, f"test-{secrets.token_hex(4)}")
    admission = Admission(
        catalog,
        live,
        authenticator,
        resolver,
        running,
        UsageWriter(usage_log),
        outage,
        QueueLimits(catalog, running, engine, max_queued=max_queued, max_queued_per_tenant=max_queued_per_tenant),
        LocalAdmission(outage, authenticator, running, LocalLimits(clock=steady)),
        process=process,
        clock=clock,
        steady=steady,
    )
    snapshots = Snapshots(
        live,
        runtime,
        running,
        residency,
        admission.unsettled,
        process=process,
        engine=f"engine-of-{process}",
        clock=clock,
        steady=steady,
    )
    draining = Draining(catalog, running, residency, others)
    pins = Pins(catalog, residency, engine, base, clock=clock)
    revocation = Revocation(catalog, authenticator, running, clock=clock)
    return Node(
        documents=documents,
        blobs=blobs,
        live=live,
        outage=outage,
        catalog=catalog,
        declarations=declarations,
        quota=quota,
        tenants=TenantService(catalog, declarations, quota, clock=clock),
        tenant_deletion=TenantDeletionService(catalog, declarations, revocation, draining, clock=clock),
        erasure=Erasure(
            catalog,
            declarations,
            live,
            Remains(data_dir, UploadStore(data_dir)),
            lambda now: sweep_contents(data_dir, packed_dir, engine.model.layout, now),
            clock=clock,
        ),
        retirement=Retirement(catalog, documents, live, authenticator, clock=clock),
        keys=KeyService(catalog, declarations, clock=clock),
        versions=VersionService(
            access,
            declarations,
            quota,
            authenticator,
            base=base,
            served_names=[base_name],
            keep_versions=keep_versions,
            clock=clock,
        ),
        aliases=AliasService(access, base, clock=clock),
        adapters=AdapterService(access, quota, residency, draining, pins, base, clock=clock),
        running=running,
        residency=residency,
        snapshots=snapshots,
        authenticator=authenticator,
        resolver=resolver,
        admission=admission,
        revocation=revocation,
        pins=pins,
        usage_log=usage_log,
        engine=engine,
        runtime=runtime,
        packer=packer,
        clock=clock,
        steady=steady,
        data_dir=data_dir,
    )


@contextlib.asynccontextmanager
async def running_node(
    data_dir: Path,
    url: str,
    *,
    follow: bool = True,
    synchronise: bool = True,
    flag_keys: tuple[str, ...] = (),
    grace_s: float = 60.0,
    max_loaded: int = 100,
    max_queued: int = 256,
    max_queued_per_tenant: int | None = None,
    base_name: str = "tiny",
    layout: BaseLayout | None = None,
    keep_versions: int | None = None,
) -> AsyncIterator[Node]:
    """follow: run catalog and revocation in the background. layout: of the base; None = the fake engine's own."""
    node = await build_node(
        data_dir,
        url,
        flag_keys=flag_keys,
        grace_s=grace_s,
        max_loaded=max_loaded,
        max_queued=max_queued,
        max_queued_per_tenant=max_queued_per_tenant,
        base_name=base_name,
        layout=layout,
        keep_versions=keep_versions,
    )
    tasks: list[asyncio.Task[None]] = []
    try:
        if synchronise:
            await node.catalog.synchronise()
        if follow:
            tasks = [asyncio.create_task(node.catalog.run()), asyncio.create_task(node.revocation.run())]
        yield node
    finally:
        await cancelled(tasks)
        await node.residency.close()
        await node.admission.close()
        await node.declarations.close()
        await node.catalog.close()
        await node.live.close()
        node.usage_log.close()
        for task in tasks:
            if not task.cancelled():
                task.result()


@contextlib.asynccontextmanager
async def two_nodes(data_dir: Path, url: str, *, follow: bool = True) -> AsyncIterator[tuple[Node, Node]]:
    """Two servers that share a data directory and a Redis, with the tenants of `with_tenants`; both know them if they
    follow. follow: see `running_node`."""
    async with running_node(data_dir, url, follow=follow) as one, running_node(data_dir, url, follow=follow) as two:
        await with_tenants(one)
        if follow:
            await eventually(lambda: two.catalog.tenant("globex") is not None)  # the last of them
        yield one, two


async def with_tenants(node: Node) -> Node:
    await node.tenants.ensure_builtin()
    await node.tenants.create(ADMIN, "r", "acme")
    await node.tenants.create(ADMIN, "r", "globex")
    return node


async def eventually(condition: Callable[[], bool]) -> None:
    """Fails if the condition does not become true within `WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())

"""An `UploadService` on a real store, with a publisher that keeps documents in memory instead of writing them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.rules import AdapterRules

from loraserve.control.adapters.versions import Published
from loraserve.control.documents.adapter_edits import Content, add_version, find_published
from loraserve.control.ingest.processes import Ingest, packed_folder
from loraserve.control.tenancy.principal import Principal, server_principal
from loraserve.control.uploads.commits import Smoke
from loraserve.control.uploads.service import UploadService
from loraserve.store.blobs import BLOB_FILES, BlobStore
from loraserve.store.records import AdapterDoc, BaseRecord, Document, DocumentKind, adapter_id
from loraserve.store.upload_session import UPLOAD_FILES, UploadFile, UploadSession
from loraserve.store.uploads import UploadStore
from tests.unit.adapters.folders import tiny_layout

ALICE = server_principal("alice", "key-of-alice")
BOB = server_principal("bob", "key-of-bob")


BASE = BaseRecord(name="tiny", fingerprint="b" * 64)


class MemoryPublisher:
    """Like `VersionService`, but its documents are lost with it."""

    def __init__(self) -> None:
        self.documents: dict[str, AdapterDoc] = {}
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        """Raised for every caller."""
        self.unpublished: list[UploadSession] = []
        """As passed to the last `publish`."""

    def check_name(self, name: str) -> None:
        assert name

    async def check_may_publish(self, principal: Principal, name: str) -> None:
        principal.require_adapter(name)
        if self.refusal is not None:
            raise self.refusal

    async def publish(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        content: Content,
        *,
        activate: bool = True,
        unpublished: Sequence[UploadSession] = (),
    ) -> Published:
        await self.check_may_publish(principal, name)
        self.unpublished = [*unpublished]
        if self.error is not None:
            raise self.error
        document_id = adapter_id(principal.acting_tenant, name)
        doc = self.documents.get(document_id)
        created = doc is None or find_published(doc, content) is None
        doc = add_version(
            doc, principal.acting_tenant, name, content, BASE, activate=activate, by=principal.actor, now=time.time()
        )
        self.documents[document_id] = doc
        version = find_published(doc, content)
        assert version is not None
        document = Document(
            kind=DocumentKind.ADAPTER,
            id=document_id,
            rev=1,
            at=time.time(),
            actor=principal.actor,
            action="version.publish",
            request_id=request_id,
            doc=doc,
        )
        return Published(document, version, created)


class OpenQuota:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int, int]] = []
        self.error: Exception | None = None
        self.limit: int | None = None
        """In bytes; only uploads use it up."""
        self.unpublished: list[UploadSession] = []
        """As passed to the last `check`."""

    def check(
        self,
        tenant: str,
        name: str,
        size_bytes: int,
        *,
        open_bytes: int = 0,
        unpublished: Sequence[UploadSession] = (),
    ) -> None:
        self.unpublished = [*unpublished]
        self.asked.append((tenant, name, size_bytes, open_bytes))
        if self.error is not None:
            raise self.error

    def room_bytes(self, tenant: str, *, open_bytes: int = 0, unpublished: Sequence[UploadSession] = ()) -> int | None:
        left_bytes = sum(session.size_bytes for session in unpublished)
        return None if self.limit is None else max(0, self.limit - open_bytes - left_bytes)


@dataclass
class UploadBench:
    """Everything an upload touches, below one data directory."""

    data_dir: Path
    layout: BaseLayout = field(default_factory=tiny_layout)
    command: tuple[str, ...] | None = None
    """Replaces the ingest process."""
    shared_ingest: Ingest | None = None
    """Replaces its own, whose process takes 0.4 s of one core to start."""
    smoke: Smoke | None = None
    """Replaces a first generation that is only recorded."""

    def __post_init__(self) -> None:
        self.store = UploadStore(self.data_dir)
        self.blobs = BlobStore(self.data_dir)
        self.packed_dir = packed_folder(self.data_dir)
        self.publisher = MemoryPublisher()
        self.quota = OpenQuota()
        self.smoked: list[str] = []
        self.smoke_error: Exception | None = None
        self.certified: list[str] = []
        self._ingest = self.shared_ingest
        self._service: UploadService | None = None

    @property
    def ingest(self) -> Ingest:
        if self._ingest is None:
            options: dict[str, Any] = {} if self.command is None else {"command": self.command}
            self._ingest = Ingest(
                packed_dir=self.packed_dir,
                layout=lambda: self.layout,
                rules=AdapterRules(base_names=("org/tiny",), chat_templates=()),
                **options,
            )
        return self._ingest

    @property
    def service(self) -> UploadService:
        if self._service is None:
            self._service = UploadService(
                self.store,
                self.blobs,
                self.ingest,
                publisher=self.publisher,
                quota=self.quota,
                smoke=self.smoke or self._smoke,
                certify=self.certified.append,
            )
        return self._service

    @asynccontextmanager
    async def _smoke(self, content: Content) -> AsyncIterator[None]:
        self.smoked.append(content.digest)
        if self.smoke_error is not None:
            raise self.smoke_error
        yield

    async def send(self, files: dict[str, bytes], *, principal: Principal = ALICE, name: str = "sql") -> UploadSession:
        """Send a whole upload in chunks; returns the settled session. Raises what the service raises."""
        session = await self.service.open(principal, name, announced(files))
        for file in UPLOAD_FILES:
            await self.service.put_chunk(principal, session.id, file, 0, body(files[file]))
        await self.service.commit(principal, "request", session.id)
        return await self.service.get(principal, session.id, wait_s=120)

    def remains(self) -> list[str]:
        """What is on disk besides the records of sessions: blobs, packed forms and parts."""
        ignored = {"session.json", "lock", "claim"}
        files = (os.path.join(folder, name) for folder, _, names in os.walk(self.data_dir) for name in names)
        start = len(f"{self.data_dir}/")
        return sorted(path[start:] for path in files if os.path.basename(path) not in ignored)

    def contents(self) -> list[str]:
        """Digests of complete blobs; fails if one is incomplete."""
        digests = sorted(self.blobs.digests())
        for digest in digests:
            folder = self.blobs.folder(digest)
            assert folder is not None
            assert {path.name for path in folder.iterdir()} >= BLOB_FILES
        return digests


def announced(files: dict[str, bytes]) -> list[UploadFile]:
    return [UploadFile(name=name, size_bytes=len(data)) for name, data in files.items()]


async def body(data: bytes, block: int = 1 << 20) -> AsyncIterator[bytes]:
    for start in range(0, len(data), block):
        await asyncio.sleep(0)
        yield data[start : start + block]

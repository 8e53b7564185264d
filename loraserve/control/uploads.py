"""Uploads of adapters, from the first byte to the published version: one session for every way in.

`open → validating → loading → ready`, or `rejected` (the report says why), `failed` (commit can be tried again),
`expired`, `aborted`. Nothing is visible before a session is ready; a crash at any point leaves a session whose commit
can be repeated.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import msgspec
from loraserve_adapters.checks import Checks
from loraserve_adapters.config import CONFIG_NAME, check_config
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import DEFAULT_LIMITS, Limits
from loraserve_adapters.safetensors_file import LENGTH_BYTES, WEIGHTS_NAME, header_end

from loraserve.control.adapter_edits import Content
from loraserve.control.ingest import Ingest, IngestError
from loraserve.control.manifest import Manifest
from loraserve.control.principal import Principal
from loraserve.control.report import AdapterRejectedError, Report
from loraserve.control.upload_source import open_source
from loraserve.control.versions import Published
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.blobs import BlobStore
from loraserve.store.errors import OffsetError, StoreError, UploadFileError, UploadNotFoundError, UploadStateError
from loraserve.store.upload_session import UploadFile, UploadResult, UploadSession, UploadState
from loraserve.store.uploads import UploadStore

MAX_OPEN_UPLOADS = 64
"""Of one tenant; each may hold bytes on the disk for a day."""
POLL_S = 0.5
"""How often a session that another process works on is looked at."""
OFFSET_HEADER = "upload-offset"

_logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """See `VersionService`."""

    def check_name(self, name: str) -> None: ...

    async def publish(
        self, principal: Principal, request_id: str, name: str, content: Content, *, activate: bool = True
    ) -> Published: ...


class QuotaCheck(Protocol):
    """See `Quota.check`."""

    def check(self, tenant: str, name: str, size_bytes: int, *, open_bytes: int = 0) -> None: ...


Smoke = Callable[[str], Awaitable[None]]
"""Generates with a digest on the live engine. Raises `AdapterRejectedError`, or `ServingError` for other reasons."""
Certify = Callable[[str], None]
"""Queues the parity certificate of a digest; never raises."""


class UploadService:
    """Called on the event loop. Every method raises `ServingError`; a foreign session is a missing one (404)."""

    def __init__(
        self,
        store: UploadStore,
        blobs: BlobStore,
        ingest: Ingest,
        *,
        publisher: Publisher,
        quota: QuotaCheck,
        smoke: Smoke,
        certify: Certify,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._ingest = ingest
        self._publisher = publisher
        self._quota = quota
        self._smoke = smoke
        self._certify = certify
        self._limits = limits
        self._opening = asyncio.Lock()
        self._commits: dict[str, asyncio.Task[None]] = {}
        self._judged: dict[str, set[str]] = {}
        """Of open sessions: which of "config" and "header" was found good."""

    async def start(self) -> None:
        """Sessions whose commit died with its process are open again. Once, before the first request."""
        recovered = await asyncio.to_thread(self._store.recover)
        for session in recovered:
            _logger.info(
                "upload %s of %s/%s is open again: commit it once more", session.id, session.tenant, session.name
            )
        await self.expire()

    async def close(self) -> None:
        """Stops running commits; their sessions can be committed again."""
        tasks = list(self._commits.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def expire(self) -> None:
        """Call each minute."""
        await asyncio.to_thread(self._store.recover)
        for session in await asyncio.to_thread(self._store.expire):
            self._judged.pop(session.id, None)

    async def open(
        self, principal: Principal, name: str, files: Sequence[UploadFile], *, activate: bool = True
    ) -> UploadSession:
        """Name, files, sizes and quota are checked here; sessions that are not settled count as used."""
        self._publisher.check_name(name)
        self._check_sizes(files)
        tenant = principal.acting_tenant
        async with self._opening:
            sessions = await asyncio.to_thread(self._store.sessions, tenant)
            pending = [session for session in sessions if not session.state.is_final]
            if len(pending) >= MAX_OPEN_UPLOADS:
                message = f"{len(pending)} uploads are open, at most {MAX_OPEN_UPLOADS} can be: commit or abort some."
                raise ServingError(ErrorCode.INSUFFICIENT_QUOTA, message)
            open_bytes = sum(session.size_bytes for session in pending)
            self._quota.check(tenant, name, sum(file.size_bytes for file in files), open_bytes=open_bytes)
            with _store_errors():
                return await asyncio.to_thread(
                    self._store.create,
                    tenant=tenant,
                    name=name,
                    actor=principal.actor,
                    files=files,
                    activate=activate,
                )

    async def put_chunk(
        self, principal: Principal, upload_id: str, file: str, start: int, body: AsyncIterator[bytes]
    ) -> int:
        """Stores a chunk, or a whole file, from byte `start`; returns where the next one starts.

        Raises `AdapterRejectedError` as soon as the config or the header of the weights is refused: the session ends.
        """
        session = await self._of(principal, upload_id)
        if session.state is UploadState.REJECTED:
            raise _rejected(session)
        offset = start
        async for piece in _pieces(body, session.chunk_bytes):
            offset = await self._append(upload_id, file, offset, piece)
            await self._judge_what_is_here(upload_id)
        return offset

    async def commit(self, principal: Principal, request_id: str, upload_id: str) -> UploadSession:
        """Starts validation and publishing, and returns at once; `get` waits for the outcome. Idempotent."""
        session = await self._of(principal, upload_id)
        if session.state not in (UploadState.OPEN, UploadState.FAILED):
            return session
        if not session.is_complete:
            missing = ", ".join(
                f"{f.name} {f.received_bytes} of {f.size_bytes}" for f in session.files if not f.is_complete
            )
            message = f"Upload {upload_id} is not complete (bytes received: {missing}). Send the rest, then commit."
            raise ServingError(ErrorCode.UPLOAD_STATE, message)
        with ExitStack() as claim, _store_errors():
            if not claim.enter_context(self._store.claim(upload_id)):
                return await asyncio.to_thread(self._store.load, upload_id)
            session = await self._to_state(upload_id, UploadState.VALIDATING)
            self._judged.pop(upload_id, None)
            task = asyncio.create_task(self._finish(claim.pop_all(), principal, request_id, session))
        self._commits[upload_id] = task
        task.add_done_callback(lambda _: self._commits.pop(upload_id, None))
        return session

    async def get(self, principal: Principal, upload_id: str, wait_s: float = 0.0) -> UploadSession:
        """The session as it is; one that is being committed is waited for, up to `wait_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            session = await self._of(principal, upload_id)
            left_s = deadline - loop.time()
            if session.state not in (UploadState.VALIDATING, UploadState.LOADING) or left_s <= 0:
                return session
            task = self._commits.get(upload_id)
            if task is None:
                await asyncio.sleep(min(POLL_S, left_s))
            else:
                await asyncio.wait({task}, timeout=left_s)

    async def abort(self, principal: Principal, upload_id: str) -> UploadSession:
        """Ends the session and removes what was sent; refused (409) once its content is being published."""
        session = await self._of(principal, upload_id)
        if session.state is UploadState.ABORTED:
            return session
        if session.state is UploadState.LOADING:
            raise ServingError(ErrorCode.UPLOAD_STATE, f"Upload {upload_id} is being published: it cannot be aborted.")
        task = self._commits.get(upload_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._judged.pop(upload_id, None)
        with _store_errors():
            return await asyncio.to_thread(self._store.update, upload_id, _aborted)

    async def list(self, principal: Principal) -> list[UploadSession]:
        """Of the acting tenant, newest first."""
        return await asyncio.to_thread(self._store.sessions, principal.acting_tenant)

    async def from_path(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        path: Path,
        *,
        roots: Sequence[Path] | None,
        follow_symlinks: bool = False,
        activate: bool = True,
    ) -> UploadSession:
        """Copies a folder of this machine in through a session, and waits for the outcome: ready, or an error.

        roots: folders that the path must be in; None = any. follow_symlinks: only for paths of the command line, since
        Hugging Face's cache is made of links; never for a client's.
        """
        with open_source(path, roots=roots, follow_symlinks=follow_symlinks, limits=self._limits) as source:
            session = await self.open(principal, name, source.files, activate=activate)
            try:
                for file in source.files:
                    await self.put_chunk(principal, session.id, file.name, 0, source.read(file.name))
                await self.commit(principal, request_id, session.id)
                while not session.state.is_settled:
                    session = await self.get(principal, session.id, wait_s=60.0)
            finally:
                # Nobody will come back for it.
                if not session.state.is_final:
                    with contextlib.suppress(ServingError):
                        await self.abort(principal, session.id)
        if session.state is UploadState.REJECTED:
            raise _rejected(session)
        if session.state is not UploadState.READY:
            raise ServingError(ErrorCode.SERVICE_UNAVAILABLE, session.error or f"The upload is {session.state}.")
        return session

    async def _of(self, principal: Principal, upload_id: str) -> UploadSession:
        with _store_errors():
            session = await asyncio.to_thread(self._store.load, upload_id)
            if session.tenant != principal.acting_tenant:
                raise UploadNotFoundError(upload_id)
            return session

    def _check_sizes(self, files: Sequence[UploadFile]) -> None:
        limits = {CONFIG_NAME: self._limits.max_config_bytes, WEIGHTS_NAME: self._limits.max_weights_bytes}
        for file in files:
            limit = limits.get(file.name)
            if limit is not None and file.size_bytes > limit:
                raise invalid_value(
                    "files", f"has a {file.name} of {file.size_bytes} bytes; at most {limit} are taken."
                )

    async def _append(self, upload_id: str, file: str, offset: int, piece: bytes) -> int:
        with _store_errors():
            return await asyncio.to_thread(self._store.append, upload_id, file, offset, piece)

    async def _judge_what_is_here(self, upload_id: str) -> None:
        """Looks at the config and at the header of the weights as soon as each has arrived."""
        judged = self._judged.setdefault(upload_id, set())
        if len(judged) == 2:
            return
        session = await asyncio.to_thread(self._store.load, upload_id)
        config, weights = session.file(CONFIG_NAME), session.file(WEIGHTS_NAME)
        if config is None or weights is None or not config.is_complete:
            return
        config_path = self._store.part_path(upload_id, CONFIG_NAME)
        weights_path = self._store.part_path(upload_id, WEIGHTS_NAME)
        if "config" not in judged:
            report = await asyncio.to_thread(_report_on_config, config_path, self._limits)
            await self._reject_unless_accepted(upload_id, report)
            judged.add("config")
        if await asyncio.to_thread(_has_header, weights_path, weights, self._limits):
            with contextlib.suppress(IngestError):
                # The commit judges it again, so a process that died here is no reason to refuse.
                report = await self._ingest.judge(config_path, weights_path, weights.size_bytes)
                await self._reject_unless_accepted(upload_id, report)
            judged.add("header")

    async def _reject_unless_accepted(self, upload_id: str, report: Report) -> None:
        if report.accepted:
            return
        self._judged.pop(upload_id, None)
        with contextlib.suppress(StoreError):
            await self._to_state(upload_id, UploadState.REJECTED, report=_encoded(report))
        raise AdapterRejectedError(report)

    async def _finish(self, claim: ExitStack, principal: Principal, request_id: str, session: UploadSession) -> None:
        """The work of a commit; ends in a settled state unless it is cancelled."""
        with claim:
            try:
                await self._validate_and_publish(principal, request_id, session)
            except AdapterRejectedError as error:
                await self._settle(session.id, UploadState.REJECTED, report=_encoded(error.report))
            except (ServingError, IngestError, StoreError) as error:
                await self._settle(session.id, UploadState.FAILED, error=f"{_sentence(str(error))} Commit again.")
            except OSError as error:
                _logger.exception("upload %s failed", session.id)
                reason = f"the data directory cannot be written ({error.strerror})"
                await self._settle(session.id, UploadState.FAILED, error=f"{_sentence(reason)} Commit again.")
            except Exception:
                _logger.exception("upload %s failed", session.id)
                reason = "Something unexpected went wrong; the server's log says what. Commit again."
                await self._settle(session.id, UploadState.FAILED, error=reason)

    async def _validate_and_publish(self, principal: Principal, request_id: str, session: UploadSession) -> None:
        folder = await asyncio.to_thread(self._store.prepare, session.id)
        announced = {file.name: file.sha256 for file in session.files if file.sha256 is not None}
        answer = await self._ingest.ingest(folder, announced)
        manifest = answer.manifest
        if manifest is None or not answer.report.accepted:
            raise AdapterRejectedError(answer.report)
        await self._to_state(session.id, UploadState.LOADING, report=_encoded(answer.report))
        await asyncio.to_thread(self._keep, folder, manifest)
        await self._smoke(manifest.digest)
        content = Content(
            digest=manifest.digest,
            upload_id=session.id,
            size_bytes=session.size_bytes,
            max_rank=manifest.max_lora_rank,
            targets=manifest.target_modules,
        )
        published = await self._publisher.publish(
            principal, request_id, session.name, content, activate=session.activate
        )
        result = UploadResult(version=published.version.n, digest=manifest.digest, created=published.created)
        await self._to_state(session.id, UploadState.READY, result=result)
        self._certify(manifest.digest)

    def _keep(self, folder: Path, manifest: Manifest) -> None:
        self._ingest.keep_packed(folder, manifest)
        self._blobs.publish(folder, manifest.digest)

    async def _settle(
        self, upload_id: str, state: UploadState, *, report: msgspec.Raw | None = None, error: str | None = None
    ) -> None:
        try:
            await self._to_state(upload_id, state, report=report, error=error)
        except (StoreError, OSError):
            _logger.exception("upload %s could not become %s", upload_id, state)

    async def _to_state(
        self,
        upload_id: str,
        state: UploadState,
        *,
        report: msgspec.Raw | None = None,
        result: UploadResult | None = None,
        error: str | None = None,
    ) -> UploadSession:
        def change(session: UploadSession) -> UploadSession:
            return msgspec.structs.replace(
                session,
                state=state,
                report=session.report if report is None else report,
                result=result,
                error=error,
            )

        return await asyncio.to_thread(self._store.update, upload_id, change)


def _aborted(session: UploadSession) -> UploadSession:
    """NOTE: one that came to be loading meanwhile may have a document already, so it must stay what it is."""
    if session.state is UploadState.LOADING:
        raise UploadStateError(session.id, session.state, "be aborted while it is published")
    return msgspec.structs.replace(session, state=UploadState.ABORTED)


def report_of(session: UploadSession) -> Report | None:
    """What was checked so far."""
    return msgspec.json.decode(session.report, type=Report | None)


def _encoded(report: Report) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(report))


def _rejected(session: UploadSession) -> ServingError:
    return AdapterRejectedError(report_of(session) or Report(checks=[]))


def _report_on_config(path: Path, limits: Limits) -> Report:
    """Without patterns, which are matched in a process of their own."""
    checks = Checks()
    # There is no part of a file that was announced as empty.
    check_config(path.read_bytes() if path.exists() else b"", limits, checks)
    return Report(checks=checks.listed())


def _has_header(path: Path, weights: UploadFile, limits: Limits) -> bool:
    """Whether enough is here to judge the header, or to refuse its length."""
    if weights.received_bytes < min(LENGTH_BYTES, weights.size_bytes) or not path.exists():
        return False
    with open(path, "rb") as file:
        first_bytes = file.read(LENGTH_BYTES)
    try:
        return weights.received_bytes >= header_end(first_bytes, weights.size_bytes, limits)
    except AdapterError:
        return True


async def _pieces(body: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """The body in pieces of `size` bytes, the last one shorter."""
    buffer = bytearray()
    async for block in body:
        buffer += block
        while len(buffer) >= size:
            yield bytes(buffer[:size])
            del buffer[:size]
    if buffer:
        yield bytes(buffer)


@contextlib.contextmanager
def _store_errors():
    """What the store refuses, as a client is told."""
    try:
        yield
    except UploadNotFoundError as error:
        raise ServingError(ErrorCode.NOT_FOUND, _sentence(str(error))) from None
    except OffsetError as error:
        headers = {OFFSET_HEADER: str(error.actual)}
        raise ServingError(ErrorCode.UPLOAD_OFFSET, _sentence(str(error)), headers=headers) from None
    except UploadStateError as error:
        raise ServingError(ErrorCode.UPLOAD_STATE, _sentence(str(error))) from None
    except UploadFileError as error:
        raise ServingError(ErrorCode.INVALID_VALUE, _sentence(str(error)), param="files") from None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."

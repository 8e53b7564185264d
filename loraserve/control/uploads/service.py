"""Uploads of adapters, from the first byte to the published version. Every way to upload uses a session.

`open → validating → loading → ready`, or `rejected` (the report says why), `failed` (commit can be tried again),
`expired`, `aborted`. Nothing is visible before a session is ready; a crash at any point leaves a session whose commit
can be repeated.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from loraserve_adapters.config import CONFIG_NAME
from loraserve_adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraserve_adapters.safetensors_file import WEIGHTS_NAME

from loraserve.control.ingest.processes import Ingest
from loraserve.control.ingest.report import AdapterRejectedError
from loraserve.control.tenancy.principal import Principal
from loraserve.control.unavailable import RETRY_AFTER_S
from loraserve.control.uploads.commits import COMMIT_AGAIN, Certify, Publisher, Smoke, UploadCommits
from loraserve.control.uploads.errors import store_errors
from loraserve.control.uploads.judge import UploadJudge
from loraserve.control.uploads.source import FollowLinks, UploadSource, open_source
from loraserve.control.uploads.states import aborted, rejection_of, to_state
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.blobs import BlobStore
from loraserve.store.errors import StoreError, UploadNotFoundError
from loraserve.store.upload_session import UploadFile, UploadSession, UploadState
from loraserve.store.uploads import UploadStore

COMMITTABLE = (UploadState.OPEN, UploadState.FAILED)
MAX_OPEN_UPLOADS = 64
"""Per tenant, including forms that a server is receiving; each may occupy disk space for a day."""
MAX_UNPUBLISHED = 200
"""Per tenant: uploads that ended without a version, while their content is on disk. Their records are kept as long."""
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
POLL_S = 0.5
"""How often to check a session that another process works on."""

_logger = logging.getLogger(__name__)


class QuotaCheck(Protocol):
    """See `Quota`."""

    def check(
        self,
        tenant: str,
        name: str,
        size_bytes: int,
        *,
        open_bytes: int = 0,
        unpublished: Sequence[UploadSession] = (),
    ) -> None: ...

    def room_bytes(
        self, tenant: str, *, open_bytes: int = 0, unpublished: Sequence[UploadSession] = ()
    ) -> int | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class IncomingForm:
    """A form that this server is receiving. Counts as an open upload of its tenant until it has become one."""

    tenant: str
    size_bytes: int
    """The size it counts with."""
    max_bytes: int | None
    """The most its files may have together; None = no limit."""


@dataclass(frozen=True, slots=True, eq=False)
class _Uncommitted:
    """What a tenant has on disk, or may come to have, besides its versions."""

    open_bytes: int
    unpublished: list[UploadSession]


class UploadService:
    """Called on the event loop. Every method raises `ServingError`; another tenant's session is missing (404)."""

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
        limits: AdapterLimits = DEFAULT_LIMITS,
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._quota = quota
        self._limits = limits
        self._opening = asyncio.Lock()
        self._incoming: set[IncomingForm] = set()
        self._judge = UploadJudge(store, ingest, limits)
        self._commits = UploadCommits(store, blobs, ingest, publisher=publisher, smoke=smoke, certify=certify)

    async def start(self) -> None:
        """Reopen sessions whose commit died with its process. Call once, before the first request."""
        recovered = await asyncio.to_thread(self._store.recover)
        for session in recovered:
            _logger.info("upload %s of %s/%s is open again: commit it again", session.id, session.tenant, session.name)
        await self.expire()

    async def close(self) -> None:
        """Stops running commits; their sessions can be committed again."""
        await self._commits.close()

    async def expire(self) -> None:
        """Call every minute."""
        await asyncio.to_thread(self._store.recover)
        for session in await asyncio.to_thread(self._store.expire):
            self._judge.forget(session.id)

    @contextlib.asynccontextmanager
    async def incoming(self, principal: Principal, size_bytes: int | None) -> AsyncGenerator[IncomingForm]:
        """Enter it before the first byte of a form is stored; `from_path` turns the form into a session.

        size_bytes: the least its files have; None = not announced, so that it may take all the room there is.
        """
        tenant = principal.acting_tenant
        async with self._opening:
            found = await self._uncommitted(tenant)
            room_bytes = self._quota.room_bytes(tenant, open_bytes=found.open_bytes, unpublished=found.unpublished)
            if room_bytes is not None and (size_bytes or 1) > room_bytes:
                raise form_too_large(room_bytes)
            counted_bytes = (room_bytes or 0) if size_bytes is None else size_bytes
            form = IncomingForm(tenant, counted_bytes, room_bytes)
            self._incoming.add(form)
        try:
            yield form
        finally:
            self._incoming.discard(form)

    async def open(
        self,
        principal: Principal,
        name: str,
        files: Sequence[UploadFile],
        *,
        activate: bool = True,
        form: IncomingForm | None = None,
    ) -> UploadSession:
        """Checks name, files, sizes and quota; unsettled sessions and forms count as used.

        form: the source of the session. A principal that lost the right to publish while sending it is refused (401 or
        403).
        """
        self._publisher.check_name(name)
        await self._publisher.check_may_publish(principal, name)
        self._check_announced(files)
        tenant = principal.acting_tenant
        async with self._opening:
            found = await self._uncommitted(tenant, without=form)
            size_bytes = sum(file.size_bytes for file in files)
            self._quota.check(tenant, name, size_bytes, open_bytes=found.open_bytes, unpublished=found.unpublished)
            with store_errors():
                session = await asyncio.to_thread(
                    self._store.create,
                    tenant=tenant,
                    name=name,
                    actor=principal.actor,
                    files=files,
                    activate=activate,
                )
            if form is not None:
                self._incoming.discard(form)
            return session

    async def put_chunk(
        self,
        principal: Principal,
        upload_id: str,
        file: str,
        start: int,
        body: AsyncIterator[bytes],
        *,
        file_bytes: int | None = None,
    ) -> int:
        """Stores a chunk, or a whole file, from byte `start`; returns where the next one starts.

        file_bytes: size of the whole file according to the client; None = not stated. Raises `AdapterRejectedError` as
        soon as the config or the header of the weights is refused, which ends the session.
        """
        session = await self._of(principal, upload_id)
        if session.state is UploadState.REJECTED:
            raise rejection_of(session)
        for announced in session.files:
            if announced.name == file and file_bytes not in (None, announced.size_bytes):
                message = f"says that {file} has {file_bytes} bytes; its upload was opened with {announced.size_bytes}."
                raise invalid_value("Content-Range", message)
        offset = start
        async for piece in _pieces(body, session.chunk_bytes):
            offset = await self._append(upload_id, file, offset, piece)
            await self._judge_received(upload_id)
        return offset

    async def commit(self, principal: Principal, request_id: str, upload_id: str) -> UploadSession:
        """Starts validation and publishing, and returns at once; `get` waits for the outcome. Idempotent."""
        session = await self._of(principal, upload_id)
        if session.state not in COMMITTABLE:
            return session
        with ExitStack() as claim, store_errors():
            is_claimed = claim.enter_context(self._store.claim(upload_id))
            # NOTE: load again: another server may have moved the files away during the first load.
            session = await asyncio.to_thread(self._store.load, upload_id)
            if not is_claimed or session.state not in COMMITTABLE:
                return session
            _check_complete(session)
            session = await to_state(self._store, upload_id, UploadState.VALIDATING)
            self._judge.forget(upload_id)
            self._commits.begin(claim.pop_all(), principal, request_id, session)
        return session

    async def get(self, principal: Principal, upload_id: str, wait_s: float = 0.0) -> UploadSession:
        """The session as it is. If it is being committed, waits for the outcome up to `wait_s`.

        If its outcome could not be written, it is unavailable (503) until it is open again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            session = await self._of(principal, upload_id)
            left_s = deadline - loop.time()
            if not session.state.is_in_commit:
                return session
            with store_errors():
                if self._commits.has_lost_outcome(upload_id):
                    raise _outcome_unwritten(upload_id)
            if left_s <= 0:
                return session
            if self._commits.is_running(upload_id):
                await self._commits.wait(upload_id, left_s)
            else:
                await asyncio.sleep(min(POLL_S, left_s))

    async def abort(self, principal: Principal, upload_id: str) -> UploadSession:
        """Ends the session and removes what was sent; refused (409) once its content is being published."""
        session = await self._of(principal, upload_id)
        if session.state is UploadState.ABORTED:
            return session
        if session.state is UploadState.LOADING:
            raise ServingError(ErrorCode.UPLOAD_STATE, f"Upload {upload_id} is being published: it cannot be aborted.")
        await self._commits.cancel(upload_id)
        self._judge.forget(upload_id)
        with store_errors():
            return await asyncio.to_thread(self._store.update, upload_id, aborted)

    async def list(self, principal: Principal) -> list[UploadSession]:
        """Of the acting tenant, newest first, without adapters that the principal may not use, and without reports."""
        sessions = await asyncio.to_thread(self._store.sessions, principal.acting_tenant)
        return [session for session in sessions if principal.may_use(session.name)]

    async def with_reports(self, sessions: Sequence[UploadSession]) -> Sequence[UploadSession]:
        """These sessions as they are now, read from disk; without those that no longer exist."""
        return await asyncio.to_thread(_read_again, self._store, sessions)

    async def from_path(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        path: Path,
        *,
        roots: Sequence[Path] | None,
        follow_links: FollowLinks = FollowLinks.NEVER,
        activate: bool = True,
        form: IncomingForm | None = None,
    ) -> UploadSession:
        """Copies a folder of this machine in through a session, and waits for the outcome: ready, or an error.

        roots: folders that must contain the path and may contain targets of its links; None = any path. follow_links:
        for such a path, because Hugging Face's cache consists of links. form: the form in the folder; follow no links
        then.
        """
        with open_source(path, roots=roots, follow_links=follow_links, limits=self._limits) as source:
            session = await self.open(principal, name, source.files, activate=activate, form=form)
            try:
                await self._copy(source, session.id)
                session = await self.commit(principal, request_id, session.id)
                while session.state.is_in_commit:
                    session = await self.get(principal, session.id, wait_s=60.0)
            finally:
                # No client will return to this session.
                if not session.state.is_final:
                    with contextlib.suppress(ServingError, OSError):
                        await self.abort(principal, session.id)
        if session.state is UploadState.REJECTED:
            raise rejection_of(session)
        if session.state is not UploadState.READY:
            # If losing the right to publish was the reason, raise that with its own status.
            await self._publisher.check_may_publish(principal, name)
            reason = (session.error or f"The upload is {session.state}.").removesuffix(COMMIT_AGAIN)
            message = f"{reason} No version was published. Try again."
            raise ServingError(ErrorCode.SERVICE_UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)
        return session

    async def _uncommitted(self, tenant: str, *, without: IncomingForm | None = None) -> _Uncommitted:
        """Raises `ServingError` if the tenant may have no more of it."""
        counted = await asyncio.to_thread(self._store.counted, tenant)
        pending = [session for session in counted if not session.state.is_final]
        unpublished = [session for session in counted if session.state.is_final]
        forms = [form for form in self._incoming if form.tenant == tenant and form is not without]
        num_open = len(pending) + len(forms)
        if num_open >= MAX_OPEN_UPLOADS:
            message = f"{num_open} uploads are open; at most {MAX_OPEN_UPLOADS} are allowed. Commit or abort some."
            raise ServingError(ErrorCode.INSUFFICIENT_QUOTA, message)
        if len(unpublished) >= MAX_UNPUBLISHED:
            raise _too_many_unpublished(unpublished)
        open_bytes = sum(session.size_bytes for session in pending) + sum(form.size_bytes for form in forms)
        known = {session.kept.digest for session in pending if session.kept is not None}
        others = [session for session in unpublished if session.kept and session.kept.digest not in known]
        return _Uncommitted(open_bytes, others)

    async def _of(self, principal: Principal, upload_id: str) -> UploadSession:
        with store_errors():
            session = await asyncio.to_thread(self._store.load, upload_id)
            if session.tenant != principal.acting_tenant or not principal.may_use(session.name):
                raise UploadNotFoundError(upload_id)
            return session

    def _check_announced(self, files: Sequence[UploadFile]) -> None:
        limits = {CONFIG_NAME: self._limits.max_config_bytes, WEIGHTS_NAME: self._limits.max_weights_bytes}
        for file in files:
            limit = limits.get(file.name)
            if limit is not None and file.size_bytes > limit:
                raise invalid_value(
                    "files", f"has a {file.name} of {file.size_bytes} bytes; at most {limit} are allowed."
                )
            if file.sha256 is not None and SHA256.fullmatch(file.sha256) is None:
                raise invalid_value("files", f"has a sha256 for {file.name} that is not 64 hexadecimal digits.")

    async def _append(self, upload_id: str, file: str, offset: int, piece: bytes) -> int:
        with store_errors():
            return await asyncio.to_thread(self._store.append, upload_id, file, offset, piece)

    async def _copy(self, source: UploadSource, upload_id: str) -> None:
        """Raises `AdapterRejectedError` before gigabytes are copied in vain.

        Only the commit judges a file that arrives in one block: each judgement costs a process.
        """
        for file in source.files:
            offset = 0
            async for block in source.read(file.name):
                offset = await self._append(upload_id, file.name, offset, block)
                if offset < file.size_bytes:
                    await self._judge_received(upload_id)

    async def _judge_received(self, upload_id: str) -> None:
        """Refused content ends its session."""
        try:
            await self._judge.judge(upload_id)
        except AdapterRejectedError as error:
            self._judge.forget(upload_id)
            with contextlib.suppress(StoreError):
                await to_state(self._store, upload_id, UploadState.REJECTED, report=error.report)
            raise


def _read_again(store: UploadStore, sessions: Sequence[UploadSession]) -> list[UploadSession]:
    found: list[UploadSession] = []
    for session in sessions:
        with contextlib.suppress(StoreError):
            found.append(store.load(session.id))
    return found


def form_too_large(room_bytes: int) -> ServingError:
    message = (
        f"The form exceeds the {room_bytes} bytes that the tenant's limit leaves for it. "
        "Delete versions, abort uploads, or request a higher limit."
    )
    return ServingError(ErrorCode.INSUFFICIENT_QUOTA, message)


def _too_many_unpublished(unpublished: Sequence[UploadSession]) -> ServingError:
    first = datetime.fromtimestamp(min(session.unpublished_until for session in unpublished), UTC)
    message = (
        f"{len(unpublished)} uploads ended without a version and left their content on the disk; "
        f"at most {MAX_UNPUBLISHED} are allowed. The first of them is removed at {first:%Y-%m-%d %H:%M} UTC."
    )
    return ServingError(ErrorCode.INSUFFICIENT_QUOTA, message)


def _check_complete(session: UploadSession) -> None:
    if not session.is_complete:
        missing = ", ".join(
            f"{file.name} {file.received_bytes} of {file.size_bytes}" for file in session.files if not file.is_complete
        )
        message = f"Upload {session.id} is not complete (bytes received: {missing}). Send the rest, then commit."
        raise ServingError(ErrorCode.UPLOAD_STATE, message)


def _outcome_unwritten(upload_id: str) -> ServingError:
    message = f"The outcome of upload {upload_id} could not be written: is the disk full? The server's log says more."
    return ServingError(ErrorCode.SERVICE_UNAVAILABLE, message)


async def _pieces(body: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """The body in pieces of `size` bytes, the last one shorter; an empty body gives one empty piece."""
    buffer, has_begun = bytearray(), False
    async for block in body:
        buffer += block
        while len(buffer) >= size:
            yield bytes(buffer[:size])
            del buffer[:size]
            has_begun = True
    if buffer or not has_begun:
        yield bytes(buffer)

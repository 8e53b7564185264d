"""Uploads in progress: one folder each, readable after a crash at any point.

`uploads/<id>/{session.json, <file>.part, prepared/, lock, claim}`. Ids are generated here and file names come from a
closed list, so nothing a client sends becomes a path. The number of received bytes is the size of the part file; it is
not stored elsewhere.
"""

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from loraserve.store.durable import (
    Bytes,
    data_folder,
    discard_folder,
    empty_trash,
    make_folder,
    replace_file,
)
from loraserve.store.errors import (
    DamagedFileError,
    OffsetError,
    UploadFileError,
    UploadNotFoundError,
    UploadStateError,
)
from loraserve.store.locks import locked, try_locked
from loraserve.store.upload_parts import UploadParts
from loraserve.store.upload_session import NO_REPORT, UPLOAD_FILES, UploadFile, UploadSession, UploadState

EXPIRE_AFTER_S = 86_400.0
"""Lifetime of an unfinished upload, from its creation."""
KEEP_FINAL_S = 7 * 86_400.0
"""How long the record of a finished upload stays readable."""
MAX_FINAL = 200
"""Records of finished uploads kept per tenant; the earliest to end are removed first. A record with a report on 110
unknown config fields is 73 KB, and one client can cause 29 of them per second."""

SPOOL = "spool"
"""Folder below the data directory for incoming multipart forms, with one folder per form."""

_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
_SESSION = "session.json"
_UNFINISHED_CREATION_S = 3600.0

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class UploadStore:
    """Synchronous; safe to use from several threads and processes at once."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_folder(data_dir, "uploads")
        self._trash = data_folder(self._folder, "trash")
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(UploadSession)
        self._ended: dict[str, tuple[tuple[int, int], UploadSession]] = {}
        """Final sessions by id, with their record's inode and modification time, so that each is read from disk once.

        Without reports, which are most of a session's size.
        """
        self._reported: dict[str, tuple[int, int]] = {}
        """Inode and modification time of damaged records that were already logged, by id."""

    def create(
        self,
        *,
        tenant: str,
        name: str,
        actor: str,
        files: Sequence[UploadFile],
        activate: bool = True,
        now: float | None = None,
    ) -> UploadSession:
        """Creates an open upload with a new id. Raises `UploadFileError` unless the files are exactly `UPLOAD_FILES`.

        Removes the tenant's oldest finished uploads, down to `MAX_FINAL`, as does every upload that ends.
        """
        _check_files(files)
        self._remove_oldest(tenant)
        now = time.time() if now is None else now
        session = UploadSession(
            id=secrets.token_hex(16),
            tenant=tenant,
            name=name,
            actor=actor,
            files=[msgspec.structs.replace(file, received_bytes=0) for file in files],
            activate=activate,
            created_at=now,
            updated_at=now,
            expires_at=now + EXPIRE_AFTER_S,
        )
        make_folder(self._path(session.id))
        self._save(session)
        return session

    def load(self, upload_id: str) -> UploadSession:
        """Raises `UploadNotFoundError`, `DamagedFileError`."""
        path = self._path(upload_id) / _SESSION
        try:
            session = self._decoder.decode(path.read_bytes())
        except FileNotFoundError:
            raise UploadNotFoundError(upload_id) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedFileError(path, f"cannot be read: {error}") from None
        if session.state.is_final:
            return session
        parts = self._parts(upload_id)
        files = [msgspec.structs.replace(file, received_bytes=parts.size_bytes(file.name)) for file in session.files]
        return msgspec.structs.replace(session, files=files)

    def update(self, upload_id: str, change: Callable[[UploadSession], UploadSession]) -> UploadSession:
        """Atomically replaces the record by the result of `change`; returns it as stored.

        Raises `UploadStateError` if the new state cannot follow the old one; `change` may raise to refuse. If the new
        state is final, the uploaded bytes are removed.
        """
        with self._locked(upload_id):
            before = self.load(upload_id)
            after = msgspec.structs.replace(change(before), id=before.id, updated_at=time.time())
            if after.state != before.state and not before.state.can_become(after.state):
                raise UploadStateError(upload_id, before.state, f"become {after.state}")
            if before.state is UploadState.LOADING and after.state is not before.state:
                after = _kept_by_now(after)
            self._save(after)
            if after.state.is_final:
                self._parts(upload_id).remove()
        if after.state.is_final:
            self._remove_oldest(after.tenant)
        return after

    def append(self, upload_id: str, file_name: str, offset: int, data: Bytes) -> int:
        """Appends bytes to a file whose length is `offset`; returns its new length.

        When this returns, the bytes survive a crash; when it raises, the file is unchanged. Raises `OffsetError` with
        the offset to continue at, `UploadFileError` for a file that was not announced or would exceed its announced
        size, `UploadStateError` unless the upload is open.
        """
        with self._locked(upload_id):
            session = self.load(upload_id)
            if session.state is not UploadState.OPEN:
                raise UploadStateError(upload_id, session.state, "accept more bytes")
            file = session.file(file_name)
            if file is None:
                announced = ", ".join(file.name for file in session.files)
                raise UploadFileError(
                    f"{file_name[:80]!a} is not part of upload {upload_id}: its files are {announced}"
                )
            end = offset + memoryview(data).nbytes
            if offset != file.received_bytes:
                raise OffsetError(file.name, offset, file.received_bytes)
            if end > file.size_bytes:
                raise UploadFileError(f"{file.name} would have {end} bytes, but {file.size_bytes} were announced")
            self._parts(upload_id).append(file.name, offset, data)
            return end

    def part_path(self, upload_id: str, file_name: str) -> Path:
        """Path of the bytes received so far, for reading only; may not exist yet. Raises `UploadFileError`."""
        return self._parts(upload_id).path(file_name)

    def prepare(self, upload_id: str) -> Path:
        """A new folder with all files under their own names, ready to be validated, given a manifest and published.

        The files are hard links, not copies: do not write to them. Raises `UploadStateError` if a file is incomplete.
        """
        with self._locked(upload_id):
            session = self.load(upload_id)
            if session.state.is_final or not session.is_complete:
                raise UploadStateError(upload_id, session.state, "be prepared before all bytes have arrived")
            return self._parts(upload_id).link_all()

    @contextmanager
    def claim(self, upload_id: str) -> Iterator[bool]:
        """Claims the commit exclusively, until exit or the death of the process. Yields whether the claim succeeded.

        Claim before the state becomes validating: an upload that is validating but unclaimed counts as crashed.
        """
        with self._entered(upload_id, try_locked(self._path(upload_id) / "claim")) as is_ours:
            yield is_ours

    def sessions(self, tenant: str | None = None) -> list[UploadSession]:
        """Newest first; tenant None = all tenants. Without reports: use `load` for these.

        Damaged records are logged and left out.
        """
        found = [session for session in self._all() if tenant is None or session.tenant == tenant]
        return sorted(found, key=lambda session: session.created_at, reverse=True)

    def counted(self, tenant: str, now: float | None = None) -> list[UploadSession]:
        """Uploads that count against the quota: not final, or with content on disk that did not become a version.

        In no particular order, without reports.
        """
        now = time.time() if now is None else now
        return [s for s in self._of(tenant) if not s.state.is_final or now < s.unpublished_until]

    def recover(self) -> list[UploadSession]:
        """Reopens uploads whose commit died with its process; returns them. Cheap enough to call every minute."""
        recovered: list[UploadSession] = []
        for session in self._all():
            if not session.state.is_in_commit:
                continue
            with suppress(UploadNotFoundError, UploadStateError), self.claim(session.id) as is_free:
                if is_free:
                    recovered.append(self.update(session.id, _reopened))
        return recovered

    def expire(self, now: float | None = None) -> list[UploadSession]:
        """Expires overdue uploads, removes old records and leftovers of crashes; returns the expired uploads."""
        now = time.time() if now is None else now
        empty_trash(self._trash)
        expired: list[UploadSession] = []
        final: dict[str, list[UploadSession]] = {}
        for session in self._all():
            if session.state.is_final:
                final.setdefault(session.tenant, []).append(session)
            with suppress(UploadNotFoundError, UploadStateError):
                if session.state.is_final and session.updated_at < now - KEEP_FINAL_S:
                    self.remove(session.id)
                elif session.state.is_final:
                    self._parts(session.id).remove()  # Left by a crash in `update`.
                elif session.state in (UploadState.OPEN, UploadState.FAILED) and session.expires_at < now:
                    expired.append(self.update(session.id, _expired))
        for sessions in final.values():
            self._remove_all(_oldest(sessions, now))
        self._remove_unfinished_creations(now - _UNFINISHED_CREATION_S)
        return expired

    def remove(self, upload_id: str) -> None:
        """Removes record and bytes; does nothing if the upload does not exist."""
        # Another waiter may get the lock once the folder is in the trash, and then find no folder.
        with suppress(UploadNotFoundError, FileNotFoundError), self._locked(upload_id):
            discard_folder(self._path(upload_id), self._trash)
        self._ended.pop(upload_id, None)

    def _remove_oldest(self, tenant: str) -> None:
        final = [session for session in self._of(tenant) if session.state.is_final]
        self._remove_all(_oldest(final, time.time()))

    def _remove_all(self, sessions: Iterable[UploadSession]) -> None:
        for session in sessions:
            self.remove(session.id)

    def _names(self) -> list[str]:
        return [*filter(_UPLOAD_ID.fullmatch, os.listdir(self._folder))]

    def _all(self) -> Iterator[UploadSession]:
        names = self._names()
        ended, reported = self._ended, self._reported
        self._ended = {name: known for name in names if (known := ended.get(name)) is not None}
        self._reported = {name: record for name in names if (record := reported.get(name)) is not None}
        return self._load_all(names)

    def _of(self, tenant: str) -> Iterator[UploadSession]:
        """Like `_all`, but does not even check the record files of final sessions already in memory."""
        for name in self._names():
            known = self._ended.get(name)
            found = self._load_all([name]) if known is None else [known[1]]
            yield from (session for session in found if session.tenant == tenant)

    def _load_all(self, names: Iterable[str]) -> Iterator[UploadSession]:
        for name in names:
            try:
                yield self._load_once(name)
            except UploadNotFoundError:
                continue
            except DamagedFileError as damage:
                self._report(name, damage)

    def _load_once(self, upload_id: str) -> UploadSession:
        """Like `load`, without the report; final sessions come from memory while their record is the same file."""
        try:
            record = self._record(upload_id)
        except FileNotFoundError:
            raise UploadNotFoundError(upload_id) from None
        known = self._ended.get(upload_id)
        if known is not None and known[0] == record:
            return known[1]
        session = msgspec.structs.replace(self.load(upload_id), report=NO_REPORT)
        if session.state.is_final:
            self._ended[upload_id] = (record, session)
        return session

    def _report(self, upload_id: str, damage: DamagedFileError) -> None:
        """Logs the damage once per record file, because sessions are scanned all the time."""
        record = None
        with suppress(OSError):
            record = self._record(upload_id)
        if record is None or self._reported.get(upload_id) != record:
            _logger.error("%s", damage)
        if record is not None:
            self._reported[upload_id] = record

    def _record(self, upload_id: str) -> tuple[int, int]:
        """Identity of the record file: inode and modification time in ns."""
        found = (self._path(upload_id) / _SESSION).stat()
        return found.st_ino, found.st_mtime_ns

    def _remove_unfinished_creations(self, before: float) -> None:
        for name in self._names():
            folder = self._folder / name
            with suppress(FileNotFoundError):
                if not (folder / _SESSION).exists() and folder.stat().st_mtime < before:
                    discard_folder(folder, self._trash)

    def _locked(self, upload_id: str) -> AbstractContextManager[None]:
        return self._entered(upload_id, locked(self._path(upload_id) / "lock"))

    @contextmanager
    def _entered(self, upload_id: str, lock: AbstractContextManager[T]) -> Iterator[T]:
        with ExitStack() as stack:
            try:
                held = stack.enter_context(lock)
            except FileNotFoundError:
                raise UploadNotFoundError(upload_id) from None
            yield held

    def _save(self, session: UploadSession) -> None:
        replace_file(self._path(session.id) / _SESSION, self._encoder.encode(session))

    def _parts(self, upload_id: str) -> UploadParts:
        return UploadParts(self._path(upload_id))

    def _path(self, upload_id: str) -> Path:
        if not _UPLOAD_ID.fullmatch(upload_id):
            raise UploadNotFoundError(ascii(upload_id[:80]))
        return self._folder / upload_id


def _check_files(files: Sequence[UploadFile]) -> None:
    names = sorted(file.name for file in files)
    if names != sorted(UPLOAD_FILES):
        shown = ", ".join(ascii(name[:80]) for name in names[:8])
        raise UploadFileError(
            f"an adapter consists of {' and '.join(UPLOAD_FILES)}, each once; announced: {shown or 'nothing'}"
        )
    for file in files:
        if file.size_bytes < 0:
            raise UploadFileError(f"{file.name} cannot have {file.size_bytes} bytes")


def _oldest(final: Sequence[UploadSession], now: float) -> list[UploadSession]:
    """The sessions beyond `MAX_FINAL`; `final`: one tenant's.

    NOTE: keeps those that left content on disk: nothing else records which tenant that content belongs to.
    """
    too_many = sorted(final, key=lambda session: session.updated_at)[:-MAX_FINAL]
    return [session for session in too_many if session.unpublished_until <= now]


def _kept_by_now(session: UploadSession) -> UploadSession:
    """Moves `kept.at` to now: content is swept a fixed time after it was put on disk, which is in the past by now."""
    if session.kept is None:
        return session
    return msgspec.structs.replace(session, kept=msgspec.structs.replace(session.kept, at=session.updated_at))


def _reopened(session: UploadSession) -> UploadSession:
    return msgspec.structs.replace(session, state=UploadState.OPEN)


def _expired(session: UploadSession) -> UploadSession:
    return msgspec.structs.replace(session, state=UploadState.EXPIRED)

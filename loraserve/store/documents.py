"""Documents on disk: each revision is one file, created once and never changed.

`docs/<kind>/<hh>/<sha256(id)>/<rev:08d>.json`. The commit is the exclusive creation of the next revision's file: of any
number of processes that try the same revision, exactly one succeeds. A file is fsynced before it gets its name, so
after a crash each revision is complete or absent.

While a commit runs, a hidden file in `docs/<kind>/<hh>` announces it, so the modification time of that folder changes
with every commit below it. A quick scan skips the folders in which nothing was announced since the last scan.

Retiring a document removes all its revisions while no commit is in progress (commits share `docs/lock`, retiring takes
it exclusively). Before the removal, the number in `docs/removed/<kind>` is raised, to at least the highest revision of
any removed document. New documents start above that number, so a server or an older Redis that still knows a retired
document never takes a new one with the same id for an older one. A lower number identifies an older copy of the
directory.
"""

import hashlib
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from loraserve_adapters.sync_file import sync_folder

from loraserve.store.codec import DocumentCodec
from loraserve.store.durable import (
    data_folder,
    discard_folder,
    empty_trash,
    make_folder,
    remove_folder,
    replace_file,
    set_aside,
    write_synced,
)
from loraserve.store.errors import DamagedFileError, RevisionGapError, RevisionTakenError, UnreadFileError
from loraserve.store.locks import locked, try_locked
from loraserve.store.records import AnyDocument, DocumentKind

KEEP_REVISIONS = 50
KEEP_S = 30 * 86_400.0
MAX_REVISIONS = 1000
"""Kept per document, however recent: otherwise anyone who may change a document could fill the disk with revisions."""
MAX_REVISIONS_BYTES = 8 << 20
"""Approximate total per document, so fewer large revisions are kept. 1,000 revisions of a key for 1,000 adapters took
70 MB."""
MIN_REVISIONS = 10
"""Kept however large they are."""
MAX_RETIRED_REV = 1_000_000
"""Documents with a higher revision are never retired: new ones would start there, and a file name has only 8 digits."""
QUIET_WITHIN_S = 1.0
"""How long `retire` waits for running commits. If they never pause, or a committing process was stopped, retiring is
postponed, so that it does not delay the end of this process."""

_FILE_NAME = re.compile(r"[0-9]{8}\.json")
_ANNOUNCED = ".committing-"
_TEMPORARY_KEEP_S = 3600.0
UNSETTLED_NS = 2_000_000_000
"""A folder changed this recently may change again without a new timestamp (clocks tick in steps of up to 2 s)."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScannedPrefix:
    """What a scan found in `docs/<kind>/<hh>`."""

    mtimes_ns: Mapping[str, int] = field(default_factory=dict)
    """Settled modification times by document's folder."""
    quiet_ns: int | None = None
    """Its own modification time. Unless that changes, no commit below it ended that the scan did not find. None = that
    is not certain."""


_UNSEEN = ScannedPrefix()


@dataclass(frozen=True, slots=True)
class ScanMark:
    """State of `scan_changed` after a scan; kept in memory only."""

    prefixes: Mapping[str, ScannedPrefix] = field(default_factory=dict)
    """By `<hh>`; for `DocumentStore` only."""
    damaged_revs: Mapping[str, int] = field(default_factory=dict)
    """By folder: the newest revision, for documents whose newest revision the scan could not read."""
    is_complete: bool = True
    """False: the system refused to let something be read."""

    def has_newer(self, document: AnyDocument) -> bool:
        """Whether the scan found a newer revision of this document that it could not read."""
        return self.damaged_revs.get(_folder_name(document.id), 0) > document.rev

    def has_seen(self, folder_name: str) -> bool:
        return folder_name in self.prefixes.get(folder_name[:2], _UNSEEN).mtimes_ns


def revision_of(damage: DamagedFileError) -> int:
    """The damaged revision; 0 = the file is not a revision."""
    return _rev(damage.path.name) if _FILE_NAME.fullmatch(damage.path.name) else 0


def log_damage(damage: DamagedFileError) -> None:
    _logger.error("%s", damage)


class DocumentStore:
    """Synchronous; safe to use from several threads and processes at once.

    If the newest revision is damaged, it is reported to `on_damage` and the document is not served at all: an older
    revision might un-revoke a key. Committing the next revision repairs it.
    """

    def __init__(self, data_dir: Path, on_damage: Callable[[DamagedFileError], None] = log_damage) -> None:
        self._folder = data_folder(data_dir, "docs")
        self._temporary = data_folder(self._folder, "tmp")
        self._trash = data_folder(self._folder, "trash")
        self._removed = data_folder(self._folder, "removed")
        self._lock = self._folder / "lock"
        self._kinds = {kind: str(data_folder(self._folder, kind.value)) for kind in DocumentKind}
        self._codec = DocumentCodec()
        self._on_damage = on_damage

    def get(self, kind: DocumentKind, document_id: str) -> AnyDocument | None:
        """The newest revision, even of a deleted document. Raises `DamagedFileError`."""
        folder = self._document_folder(kind, document_id)
        return self._read_newest(kind, folder, _listed(folder))

    def commit(self, document: AnyDocument) -> None:
        """When this returns, the revision survives a crash. Raises `RevisionTakenError` if another commit came first.

        At most `MAX_REVISIONS` revisions are kept, including this one, or as many of this size as fit into
        `MAX_REVISIONS_BYTES`. After an `OSError` the revision may or may not exist: read it before trying again.
        """
        temporary = self._temporary / secrets.token_hex(16)
        content = self._codec.encode(document)
        folder = Path(self._document_folder(document.kind, document.id))
        with locked(self._lock, shared=True):
            names = self._names_before(document, folder)
            if not names:
                make_folder(folder.parent)
                make_folder(folder)
            with _announced(folder.parent):
                try:
                    write_synced(temporary, content)
                    os.link(temporary, folder / _file_name(document.rev))
                except FileExistsError:
                    raise RevisionTakenError(document.kind, document.id, document.rev) from None
                finally:
                    temporary.unlink(missing_ok=True)
            sync_folder(folder)
        _remove_older(str(folder), names[_num_revisions(len(content)) - 1 :], math.inf)

    def first_rev(self, kind: DocumentKind) -> int:
        """First revision of a new document. Raises `DamagedFileError`."""
        return self.removed_rev(kind) + 1

    def removed_rev(self, kind: DocumentKind) -> int:
        """At least the highest revision of any retired document of this kind; 0 = none was retired.

        Grows with every removal. Raises `DamagedFileError`.
        """
        path = self._removed / kind
        try:
            return int(path.read_bytes())
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise _unread(str(path), error) from None
        except ValueError:
            raise DamagedFileError(path, "is not a revision number") from None

    def retire(self, documents: Sequence[AnyDocument], removed_rev: int = 0) -> list[AnyDocument]:
        """Removes the documents whose newest revision on disk is the one passed; returns them.

        Removes nothing if commits never pause. documents: all of one kind; their ids may be used again, see above.
        removed_rev: the number that other servers know. If the disk's is lower, this is an older copy of the directory
        and nothing is removed: raising its number would hide that. Raises `DamagedFileError`.
        """
        doomed = [document for document in documents if document.rev <= MAX_RETIRED_REV]
        if not doomed:
            return []
        kind = doomed[0].kind
        discarded: list[Path] = []
        with try_locked(self._lock, QUIET_WITHIN_S) as is_quiet:
            before = self.removed_rev(kind)
            doomed = [document for document in doomed if is_quiet and self._is_newest(document)]
            if not doomed or before < removed_rev:
                return []
            rev = max(before + 1, *(document.rev for document in doomed))
            replace_file(self._removed / kind, str(rev).encode())
            folders = [Path(self._document_folder(kind, document.id)) for document in doomed]
            for folder in folders:
                with suppress(FileNotFoundError):  # Another process may have erased it by now.
                    discarded.append(set_aside(folder, self._trash))
        # NOTE: sync before deleting, or a crash could bring back a folder whose newest revisions are gone.
        for parent in {folder.parent for folder in folders}:
            sync_folder(parent)
        for trash in discarded:
            remove_folder(trash)
        return doomed

    def retired_among(
        self, kind: DocumentKind, revs: Iterable[tuple[str, int]], mark: ScanMark | None = None
    ) -> list[str]:
        """Ids of the documents, known at these revisions, that were retired; not of those that disappeared otherwise.

        revs: ids and revisions. mark: from a scan; only documents that it did not find are looked up on disk. Raises
        `DamagedFileError`.
        """
        removed_rev = self.removed_rev(kind)
        mark = mark or ScanMark()
        return [
            document_id
            for document_id, rev in revs
            if rev <= removed_rev
            and not mark.has_seen(_folder_name(document_id))
            and not _is_there(self._document_folder(kind, document_id))
        ]

    def revision(self, kind: DocumentKind, document_id: str, rev: int) -> AnyDocument | None:
        """None if it never existed or was pruned. A damaged revision is reported and counts as pruned."""
        folder = self._document_folder(kind, document_id)
        if not os.path.exists(f"{folder}/{_file_name(rev)}"):
            return None
        try:
            return self._read(kind, folder, _file_name(rev))
        except DamagedFileError as damage:
            self._on_damage(damage)
            return None

    def has_any(self, kind: DocumentKind) -> bool:
        """Whether the folder of this kind contains any file, readable or not; True if that cannot be determined."""
        return _has_files(self._kinds[kind])

    def scan(self, kind: DocumentKind) -> Iterator[AnyDocument]:
        """The newest revision of every document, including deleted ones, in no particular order."""
        for entry in self._document_folders(kind, self._on_damage):
            try:
                document = self._newest_of(kind, entry.path)
            except DamagedFileError as damage:
                self._on_damage(damage)
                continue
            if document is not None:
                yield document

    def scan_changed(
        self, kind: DocumentKind, since: ScanMark | None = None, *, is_quick: bool = False
    ) -> tuple[list[AnyDocument], ScanMark]:
        """The newest revision of every document whose folder changed since the mark, and perhaps of unchanged ones.

        Without a mark, all documents. This call and those after it together miss nothing that was committed before the
        call, even if the system at first refused to let the file, or a folder above it, be read. is_quick: likewise,
        but not for revisions that came otherwise, such as by hand from a backup.
        """
        seen = since.prefixes if since is not None else {}
        settled_before_ns = time.time_ns() - UNSETTLED_NS
        changed: list[AnyDocument] = []
        prefixes: dict[str, ScannedPrefix] = {}
        damaged_revs: dict[str, int] = {}
        num_unread = 0

        def note(damage: DamagedFileError) -> None:
            nonlocal num_unread
            num_unread += isinstance(damage, UnreadFileError)
            self._on_damage(damage)

        for prefix in _sub_folders(self._kinds[kind], note):
            before, num_unread_before = seen.get(prefix.name, _UNSEEN), num_unread
            # NOTE: in this order. A commit that `_has_announced` misses changes the time after it was read.
            prefix_ns = _mtime_ns(prefix, lambda _damage: None)
            if is_quick and prefix_ns is not None and prefix_ns == before.quiet_ns:
                prefixes[prefix.name] = before
                continue
            is_quiet = prefix_ns is not None and prefix_ns < settled_before_ns and not _has_announced(prefix.path)
            mtimes_ns: dict[str, int] = {}
            for entry in _sub_folders(prefix.path, note):
                mtime_ns = _mtime_ns(entry, note)
                if mtime_ns is None:
                    continue
                is_settled = mtime_ns < settled_before_ns
                if before.mtimes_ns.get(entry.name) != mtime_ns:
                    try:
                        document = self._newest_of(kind, entry.path)
                        if document is not None:
                            changed.append(document)
                    except DamagedFileError as damage:
                        note(damage)
                        damaged_revs[entry.name] = revision_of(damage)
                        is_settled = is_settled and not isinstance(damage, UnreadFileError)
                if is_settled:
                    mtimes_ns[entry.name] = mtime_ns
            is_quiet = is_quiet and num_unread == num_unread_before
            prefixes[prefix.name] = ScannedPrefix(mtimes_ns, prefix_ns if is_quiet else None)
        return changed, ScanMark(prefixes, damaged_revs, is_complete=num_unread == 0)

    def last_commit_ns(self) -> int:
        """Changes with every commit to any document, by any process: a cheap sign that there is something to scan.

        A timestamp. Two commits within one tick of the clock share it, so it covers everything committed so far only
        once it is older than `UNSETTLED_NS`.
        """
        return os.stat(self._temporary).st_mtime_ns

    def remove(self, kind: DocumentKind, document_id: str) -> None:
        """Removes a document with all its revisions, durably; does nothing if there is none.

        NOTE: only for documents that are never committed again, since a document's revision never decreases. For
        others see `retire`.
        """
        folder = Path(self._document_folder(kind, document_id))
        with suppress(FileNotFoundError):
            discard_folder(folder, self._trash)
            sync_folder(folder.parent)

    def forget_older(self, kind: DocumentKind, document_id: str) -> None:
        """Durably removes all revisions except the newest."""
        folder = self._document_folder(kind, document_id)
        names = sorted(filter(_FILE_NAME.fullmatch, _names(folder)))
        for name in names[:-1]:
            with suppress(FileNotFoundError):
                os.unlink(f"{folder}/{name}")
        if names:
            sync_folder(Path(folder))

    def empty_trash(self) -> None:
        """Finishes removals that were interrupted when a process was killed."""
        empty_trash(self._trash)

    def prune(self, now: float | None = None) -> int:
        """Removes revisions that are neither among the last 50 nor from the last 30 days; returns the number removed.

        Revisions that the system refuses to remove stay and are reported.
        """
        now = time.time() if now is None else now
        self.empty_trash()
        num_removed = 0
        for kind in DocumentKind:
            for entry in self._document_folders(kind, self._on_damage):
                try:
                    old = _newest_first(_names(entry.path))[KEEP_REVISIONS:]
                    num_removed += _remove_older(entry.path, old, now - KEEP_S)
                except OSError as error:
                    self._on_damage(_unread(entry.path, error))
            for prefix in _sub_folders(self._kinds[kind], self._on_damage):
                with suppress(OSError):  # Reported above.
                    _remove_older(prefix.path, _announcements(prefix.path), now - _TEMPORARY_KEEP_S)
        _remove_older(str(self._temporary), os.listdir(self._temporary), now - _TEMPORARY_KEEP_S)
        return num_removed

    def _is_newest(self, document: AnyDocument) -> bool:
        """Whether this is the newest revision on disk."""
        try:
            return self.get(document.kind, document.id) == document
        except DamagedFileError:
            return False

    def _names_before(self, document: AnyDocument, folder: Path) -> list[str]:
        """File names of the earlier revisions, newest first. Raises `RevisionTakenError`, `RevisionGapError`."""
        names = _newest_first(_names(str(folder)))
        newest = _rev(names[0]) if names else self.removed_rev(document.kind)
        if newest >= document.rev:
            raise RevisionTakenError(document.kind, document.id, document.rev)
        if newest != document.rev - 1:
            raise RevisionGapError(document.kind, document.id, document.rev, newest)
        return names

    def _document_folder(self, kind: DocumentKind, document_id: str) -> str:
        name = _folder_name(document_id)
        return f"{self._kinds[kind]}/{name[:2]}/{name}"

    def _document_folders(
        self, kind: DocumentKind, on_damage: Callable[[DamagedFileError], None]
    ) -> Iterator["os.DirEntry[str]"]:
        for prefix in _sub_folders(self._kinds[kind], on_damage):
            yield from _sub_folders(prefix.path, on_damage)

    def _newest_of(self, kind: DocumentKind, folder: str) -> AnyDocument | None:
        """Raises `DamagedFileError`."""
        names = _listed(folder)
        for name in names:
            if not _FILE_NAME.fullmatch(name) and not _is_hidden(name):
                self._on_damage(DamagedFileError(f"{folder}/{name}", "not a revision"))
        return self._read_newest(kind, folder, names)

    def _read_newest(self, kind: DocumentKind, folder: str, names: list[str]) -> AnyDocument | None:
        """names: the folder's entries. Raises `DamagedFileError`."""
        newest = _newest(names)
        if newest is None:
            return None
        try:
            return self._read(kind, folder, newest)
        except UnreadFileError:
            if not _is_there(folder):
                return None  # Removed since it was listed.
            names = _listed(folder)
            if _newest(names) == newest:
                raise
            return self._read_newest(kind, folder, names)  # Retired since it was listed, and its id used again.

    def _read(self, kind: DocumentKind, folder: str, name: str) -> AnyDocument:
        path = f"{folder}/{name}"
        try:
            document = self._codec.decode(kind, _content(path))
        except OSError as error:
            raise _unread(path, error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedFileError(path, f"cannot be read: {error}") from None
        if document.rev != _rev(name) or _folder_name(document.id) != os.path.basename(folder):
            raise DamagedFileError(
                path, f"holds revision {document.rev} of {document.id!r}, which does not belong in this file"
            )
        return document


@contextmanager
def _announced(prefix: Path) -> Iterator[None]:
    """NOTE: the folder's time changes once more after the commit, even if the announcement was pruned by then."""
    announcement = prefix / f"{_ANNOUNCED}{secrets.token_hex(16)}"
    announcement.touch(mode=0o600)
    try:
        yield
    finally:
        try:
            announcement.unlink()
        except FileNotFoundError:
            prefix.touch()


def _has_announced(prefix: str) -> bool:
    """Whether a commit is running there, or its process was killed. True if that cannot be determined."""
    try:
        return bool(_announcements(prefix))
    except OSError:
        return True


def _announcements(prefix: str) -> list[str]:
    """Raises `OSError`."""
    return [name for name in os.listdir(prefix) if name.startswith(_ANNOUNCED)]


def _folder_name(document_id: str) -> str:
    return hashlib.sha256(document_id.encode()).hexdigest()


def _file_name(rev: int) -> str:
    return f"{rev:08d}.json"


def _rev(name: str | None) -> int:
    return int(name[:8]) if name is not None else 0


def _sub_folders(folder: str, on_damage: Callable[[DamagedFileError], None]) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            found = [(entry, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError as error:
        on_damage(_unread(folder, error))
        return
    for entry, is_folder in found:
        if _is_hidden(entry.name):
            continue
        if is_folder:
            yield entry
        else:
            on_damage(DamagedFileError(entry.path, "not a document's folder"))


def _mtime_ns(entry: "os.DirEntry[str]", on_damage: Callable[[DamagedFileError], None]) -> int | None:
    """None if it was removed since it was listed, or cannot be read."""
    try:
        return entry.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    except OSError as error:
        on_damage(_unread(entry.path, error))
        return None


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _listed(folder: str) -> list[str]:
    """Raises `UnreadFileError`."""
    try:
        return _names(folder)
    except OSError as error:
        raise _unread(folder, error) from None


def _unread(path: str, error: OSError) -> UnreadFileError:
    return UnreadFileError(path, f"cannot be read: {error}")


def _is_there(folder: str) -> bool:
    """NOTE: True if that cannot be determined: callers discard what is missing, so unreadable must not mean missing."""
    try:
        os.stat(folder)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return True


def _has_files(folder: str) -> bool:
    """NOTE: True if that cannot be determined: a server without keys is open, so unreadable must not mean missing."""
    try:
        with os.scandir(folder) as entries:
            shown = (entry for entry in entries if not _is_hidden(entry.name))
            return any(not entry.is_dir(follow_symlinks=False) or _has_files(entry.path) for entry in shown)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


def _num_revisions(size_bytes: int) -> int:
    """The number of revisions of this size to keep."""
    return min(MAX_REVISIONS, max(MIN_REVISIONS, MAX_REVISIONS_BYTES // size_bytes))


def _is_hidden(name: str) -> bool:
    """Not one of our files: for example `.DS_Store`, which macOS creates in folders that a user opens."""
    return name.startswith(".")


def _newest(names: list[str]) -> str | None:
    return max(filter(_FILE_NAME.fullmatch, names), default=None)


def _newest_first(names: list[str]) -> list[str]:
    return sorted(filter(_FILE_NAME.fullmatch, names), reverse=True)


def _content(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def _remove_older(folder: str, names: list[str], before: float) -> int:
    num_removed = 0
    for name in names:
        path = f"{folder}/{name}"
        with suppress(FileNotFoundError):  # Another process may be removing the same files.
            if os.stat(path).st_mtime < before:
                os.unlink(path)
                num_removed += 1
    return num_removed

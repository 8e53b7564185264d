"""Errors of the store: refused operations and damaged files. Messages are for operators: they may name server files."""

from pathlib import Path

from loraserve.store.records import DocumentKind


class StoreError(Exception):
    """Base class of all errors here; an `OSError` from the file system passes through unchanged."""


class RevisionTakenError(StoreError):
    """Another writer committed this revision first; read the newest one and decide again."""

    def __init__(self, kind: DocumentKind, document_id: str, rev: int) -> None:
        super().__init__(f"{kind} {document_id!r}: revision {rev} already exists; read the newest and try again")
        self.kind = kind
        self.document_id = document_id
        self.rev = rev


class RevisionGapError(StoreError):
    """The revision before this one does not exist."""

    def __init__(self, kind: DocumentKind, document_id: str, rev: int, newest: int) -> None:
        super().__init__(f"{kind} {document_id!r}: revision {rev} cannot follow revision {newest}")


class DamagedFileError(StoreError):
    """A file is torn, was changed, or was not written by this server. It is not served."""

    remedy = "restore it from a backup or move it away"

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}. It is not used; {self.remedy}")
        self.path = Path(path)
        self.reason = reason


class UnreadFileError(DamagedFileError):
    """The system refused to read it, perhaps temporarily: too many open files, an I/O error, another user's folder."""

    remedy = "make sure that the server's user can read it, or restore it from a backup"


class IncompleteBlobError(StoreError):
    """A folder to be published does not contain exactly the files of a blob."""


class UploadNotFoundError(StoreError):
    def __init__(self, upload_id: str) -> None:
        super().__init__(f"no upload {upload_id!r}")
        self.upload_id = upload_id


class UploadFileError(StoreError):
    """A file that is not part of this upload, is named twice, or has a size out of range."""


class UploadStateError(StoreError):
    """The upload's state does not allow this operation."""

    def __init__(self, upload_id: str, state: str, wanted: str) -> None:
        super().__init__(f"upload {upload_id} is {state}: cannot {wanted}")
        self.state = state


class OffsetError(StoreError):
    """Bytes were sent for an offset other than the end of the stored bytes; continue at `actual`."""

    def __init__(self, file: str, offset: int, actual: int) -> None:
        super().__init__(f"{file}: bytes from offset {offset}, but {actual} bytes are stored: continue at {actual}")
        self.actual = actual


class InvalidNameError(StoreError):
    """An invalid name; the message is safe to show to clients."""

"""The record of one upload, and which states follow which."""

from enum import StrEnum

import msgspec

from loraserve.store.blobs import CONFIG_FILE, SWEPT_WITHIN_S, WEIGHTS_FILE

CHUNK_BYTES = 8 * 1024 * 1024
UPLOAD_FILES = (CONFIG_FILE, WEIGHTS_FILE)
NO_REPORT = msgspec.Raw(b"null")


class UploadState(StrEnum):
    OPEN = "open"
    VALIDATING = "validating"
    LOADING = "loading"
    READY = "ready"
    REJECTED = "rejected"
    """The content is refused; the report says why."""
    FAILED = "failed"
    """Something else went wrong; commit can be tried again."""
    EXPIRED = "expired"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        return self in (UploadState.READY, UploadState.REJECTED, UploadState.EXPIRED, UploadState.ABORTED)

    @property
    def is_in_commit(self) -> bool:
        """A process works on it, or died at it, or could not write how it ended."""
        return self in (UploadState.VALIDATING, UploadState.LOADING)

    def can_become(self, state: "UploadState") -> bool:
        return state in _FOLLOWERS[self]


_FOLLOWERS: dict[UploadState, tuple[UploadState, ...]] = {
    UploadState.OPEN: (
        UploadState.VALIDATING,
        UploadState.REJECTED,  # By the config or the header of the weights, as soon as they are here.
        UploadState.EXPIRED,
        UploadState.ABORTED,
    ),
    UploadState.VALIDATING: (
        UploadState.LOADING,
        UploadState.REJECTED,
        UploadState.FAILED,
        UploadState.ABORTED,
        UploadState.OPEN,  # After a crash.
    ),
    UploadState.LOADING: (
        UploadState.READY,
        UploadState.REJECTED,
        UploadState.FAILED,
        UploadState.ABORTED,
        UploadState.OPEN,  # After a crash.
    ),
    UploadState.FAILED: (UploadState.VALIDATING, UploadState.EXPIRED, UploadState.ABORTED),
    UploadState.READY: (),
    UploadState.REJECTED: (),
    UploadState.EXPIRED: (),
    UploadState.ABORTED: (),
}


class UploadFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """One of `UPLOAD_FILES`."""
    size_bytes: int
    """Of the whole file, as announced."""
    sha256: str | None = None
    """Hex, as announced."""
    received_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        return self.received_bytes == self.size_bytes


class UploadResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    digest: str
    created: bool
    """False: this adapter had a version of the same content, which is meant."""


class KeptContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    digest: str
    at: float
    """It was put on the disk before, if at all."""


class UploadSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    tenant: str
    name: str
    """Of the adapter."""
    actor: str
    state: UploadState = UploadState.OPEN
    files: list[UploadFile]
    chunk_bytes: int = CHUNK_BYTES
    activate: bool = True
    """Whether the alias `live` moves to the new version."""
    created_at: float
    """Unix time, as all times here."""
    updated_at: float
    expires_at: float
    report: msgspec.Raw = NO_REPORT
    """JSON of the validation report, or null."""
    result: UploadResult | None = None
    """When ready."""
    error: str | None = None
    """When failed; safe to show."""
    kept: KeptContent | None = None
    """What commits put on the disk: blob and packed form, which stay there whether or not a version comes of them."""

    @property
    def size_bytes(self) -> int:
        """Announced, of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def is_complete(self) -> bool:
        return all(file.is_complete for file in self.files)

    @property
    def unpublished_until(self) -> float:
        """Until when content may be on the disk that this left there without a version; 0 = it left none."""
        if self.kept is None or self.result is not None or not self.state.is_final:
            return 0.0
        return self.kept.at + SWEPT_WITHIN_S

    def file(self, name: str) -> UploadFile | None:
        return next((file for file in self.files if file.name == name), None)

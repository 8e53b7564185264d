"""The record of one upload, and its state transitions."""

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
    """The content was rejected; the report says why."""
    FAILED = "failed"
    """Another error; the commit can be tried again."""
    EXPIRED = "expired"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        return self in (UploadState.READY, UploadState.REJECTED, UploadState.EXPIRED, UploadState.ABORTED)

    @property
    def is_in_commit(self) -> bool:
        """A process is working on it, or died while doing so, or could not record the outcome."""
        return self in (UploadState.VALIDATING, UploadState.LOADING)

    def can_become(self, state: "UploadState") -> bool:
        return state in _FOLLOWERS[self]


_FOLLOWERS: dict[UploadState, tuple[UploadState, ...]] = {
    UploadState.OPEN: (
        UploadState.VALIDATING,
        UploadState.REJECTED,  # Because of the config or the weights' header, as soon as they have arrived.
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
    """Announced size of the whole file."""
    sha256: str | None = None
    """Announced hash, hex."""
    received_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        return self.received_bytes == self.size_bytes


class UploadResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    digest: str
    created: bool
    """False: the adapter already had a version with this content; `version` is that one."""


class KeptContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    digest: str
    at: float
    """Latest possible time at which it was put on disk, if it was at all."""


class UploadSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    tenant: str
    name: str
    """Name of the adapter."""
    actor: str
    state: UploadState = UploadState.OPEN
    files: list[UploadFile]
    chunk_bytes: int = CHUNK_BYTES
    activate: bool = True
    """Whether the alias `live` moves to the new version."""
    created_at: float
    """Unix time, like all times here."""
    updated_at: float
    expires_at: float
    report: msgspec.Raw = NO_REPORT
    """JSON of the validation report, or null."""
    result: UploadResult | None = None
    """Set if ready."""
    error: str | None = None
    """Set if failed; safe to show to clients."""
    kept: KeptContent | None = None
    """Content that commits put on disk (blob and packed form). It stays there whether or not it becomes a version."""

    @property
    def size_bytes(self) -> int:
        """Announced size of all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def is_complete(self) -> bool:
        return all(file.is_complete for file in self.files)

    @property
    def unpublished_until(self) -> float:
        """Until when content that this upload left without a version may be on disk; 0 = it left none."""
        if self.kept is None or self.result is not None or not self.state.is_final:
            return 0.0
        return self.kept.at + SWEPT_WITHIN_S

    def file(self, name: str) -> UploadFile | None:
        return next((file for file in self.files if file.name == name), None)

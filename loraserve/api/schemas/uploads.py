"""Upload sessions: /v1/adapters/{name}/uploads and /v1/uploads."""

import msgspec

from loraserve.api.schemas.reports import ReportItem
from loraserve.store.upload_session import UploadState


class UploadFileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    """ "adapter_config.json" or "adapter_model.safetensors"."""
    size_bytes: int
    """Size of the whole file. At most 262,144 bytes (256 KiB) for the config and 4,294,967,296 (4 GiB) for the
    weights."""
    sha256: str | None = None
    """64 hexadecimal digits; checked if sent."""


class CreateUploadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: list[UploadFileRequest]
    """Both files."""
    activate: bool = True
    """Move the alias "live" to the new version, so that the bare name refers to it. Default: true. A first version
    always becomes live."""


class UploadFileItem(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    offset: int
    """Bytes received; the next chunk starts here."""


class UploadResult(msgspec.Struct, frozen=True):
    version: int
    digest: str
    """Hash of the content."""
    created: bool
    """False: the adapter already had a version with this content."""


class UploadItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    adapter: str
    tenant: str
    state: UploadState
    """ "open", "validating", "loading", "ready", "rejected" (the report says why), "failed" (commit it again),
    "expired" or "aborted"."""
    files: list[UploadFileItem]
    activate: bool
    """Whether the alias "live" moves to the new version."""
    chunk_bytes: int
    """Recommended size of a chunk."""
    created_at: float
    """Unix seconds."""
    expires_at: float
    """Unix seconds, 24 hours after its creation; an upload that is not committed by then expires."""
    by: str
    """Id of the key that opened it, or "open" or "config"."""
    result: UploadResult | None
    """Null unless the state is "ready"."""
    report: ReportItem | None
    """The checks made so far; null before the first."""
    error: str | None
    """Why it failed and what to do; null unless the state is "failed"."""
    object: str = "upload"


class UploadList(msgspec.Struct, frozen=True):
    data: list[UploadItem]
    next_cursor: str | None
    """Send it as `cursor` to get the next page; null on the last page."""
    object: str = "list"


class ChunkReceived(msgspec.Struct, frozen=True):
    offset: int
    """Bytes of this file received so far; the next chunk starts here."""
    object: str = "upload.chunk"

"""Upload sessions: /v1/adapters/{name}/uploads and /v1/uploads."""

import msgspec

from loraserve.api.schemas.reports import ReportItem
from loraserve.store.upload_session import UploadState


class UploadFileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    """ "adapter_config.json" or "adapter_model.safetensors"."""
    size_bytes: int
    sha256: str | None = None
    """Hex; checked when given."""


class CreateUploadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: list[UploadFileRequest]
    activate: bool = True
    """Whether the new version becomes what the bare name means. A first version always does."""


class UploadFileItem(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    offset: int
    """Bytes received: where the next chunk starts."""


class UploadResult(msgspec.Struct, frozen=True):
    version: int
    digest: str
    created: bool
    """False: this adapter had a version with the same content already."""


class UploadItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    adapter: str
    tenant: str
    state: UploadState
    """ "rejected": the report says why; "failed": commit it again."""
    files: list[UploadFileItem]
    activate: bool
    chunk_bytes: int
    """The largest body of one PUT that is not the whole file."""
    created_at: float
    """Unix seconds."""
    expires_at: float
    """Unix seconds."""
    by: str
    result: UploadResult | None
    """Of a session that is ready."""
    report: ReportItem | None
    """What was checked so far."""
    error: str | None
    """Why it failed, and what to do."""
    object: str = "upload"


class UploadList(msgspec.Struct, frozen=True):
    data: list[UploadItem]
    next_cursor: str | None
    object: str = "list"


class ChunkReceived(msgspec.Struct, frozen=True):
    offset: int
    """Bytes of this file received so far."""
    object: str = "upload.chunk"

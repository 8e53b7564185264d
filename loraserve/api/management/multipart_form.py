"""A multipart form with an adapter's two files, written to disk as it arrives."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from litestar import Request
from loraserve_adapters.limits import DEFAULT_LIMITS
from multipart import MultipartError, MultipartSegment, ParserLimitReached, PushMultipartParser, parse_options_header

from loraserve.api.http.bodies import stream_body
from loraserve.control.uploads.service import form_too_large
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.blobs import CONFIG_FILE, WEIGHTS_FILE
from loraserve.store.uploads import SPOOL

FILES = {CONFIG_FILE: DEFAULT_LIMITS.max_config_bytes, WEIGHTS_FILE: DEFAULT_LIMITS.max_weights_bytes}
"""Largest size of each file, in bytes."""
FIELDS = ("name", "activate")
MAX_FIELD_BYTES = 1024
MAX_PARTS = 8
MAX_OVERHEAD_BYTES = 64 * 1024
"""Larger than anything that clients send besides the files: fields, and a few header lines per part."""
TRUTH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class AdapterForm:
    name: str
    folder: Path
    """Contains both files; removed on leaving `receive_adapter`."""
    activate: bool


@dataclass(slots=True)
class _Parts:
    folder: Path
    max_bytes: int | None
    fields: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, BinaryIO] = field(default_factory=dict)
    _num_bytes: int = 0
    """Of all files so far."""
    _file: BinaryIO | None = None
    _field: str | None = None

    def begin(self, segment: MultipartSegment) -> None:
        if segment.filename:
            name = PurePosixPath(segment.filename.replace("\\", "/")).name
            if name not in FILES:
                raise invalid_value("files", f"has a file {name[:64]!r}; only {' and '.join(FILES)} are accepted.")
            if name in self.files:
                raise invalid_value("files", f"has {name} twice.")
            self._file = self.files[name] = (self.folder / name).open("xb")
            return
        if segment.name not in FIELDS:
            message = f"Unknown form field: '{(segment.name or '')[:64]}'; known are {', '.join(FIELDS)} and the files."
            raise ServingError(ErrorCode.UNKNOWN_PARAMETER, message)
        self._field = segment.name
        self.fields[segment.name] = b""

    def add(self, piece: bytes) -> None:
        if self._file is not None:
            self._num_bytes += len(piece)
            if self.max_bytes is not None and self._num_bytes > self.max_bytes:
                raise form_too_large(self.max_bytes)
            self._file.write(piece)
            limit = FILES[Path(self._file.name).name]
            if self._file.tell() > limit:
                raise ServingError(ErrorCode.REQUEST_TOO_LARGE, f"A file is larger than {limit} bytes.")
        elif self._field is not None:
            self.fields[self._field] += piece
            if len(self.fields[self._field]) > MAX_FIELD_BYTES:
                raise invalid_value(self._field, f"is longer than {MAX_FIELD_BYTES} bytes.")

    def end(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._field = None

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def least_size_bytes(request: Request) -> int | None:
    """Lower bound on the total size of the form's files; None = the request has no Content-Length.

    Raises `ServingError` (413) if no adapter can be that large, before the client sends it all.
    """
    length = request.content_length
    if length is None:
        return None
    if length - MAX_OVERHEAD_BYTES > sum(FILES.values()):
        message = f"The form has {length} bytes; an adapter's files may have at most {sum(FILES.values())}."
        raise ServingError(ErrorCode.REQUEST_TOO_LARGE, message)
    return max(0, length - MAX_OVERHEAD_BYTES)


@contextlib.asynccontextmanager
async def receive_adapter(request: Request, data_dir: Path, max_bytes: int | None) -> AsyncGenerator[AdapterForm]:
    """Uses little memory, whatever the form's size. max_bytes: for all files together. Raises `ServingError`."""
    boundary = _boundary(request)
    spool = data_dir / SPOOL
    spool.mkdir(mode=0o700, exist_ok=True)
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=spool))
    try:
        with contextlib.closing(_Parts(folder, max_bytes)) as parts:
            await _receive(request, boundary, parts)
        yield _form(parts)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _boundary(request: Request) -> str:
    content_type, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get("boundary")
    if content_type != "multipart/form-data" or not boundary:
        message = "The Content-Type must be multipart/form-data; to send JSON, use /v1/adapters/{name}/uploads."
        raise ServingError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message)
    return boundary


async def _receive(request: Request, boundary: str, parts: _Parts) -> None:
    try:
        with PushMultipartParser(boundary, max_segment_count=MAX_PARTS) as parser:
            async for piece in stream_body(request):
                await asyncio.to_thread(_take, parser.parse(piece), parts)
    except ParserLimitReached as error:
        raise ServingError(ErrorCode.INVALID_REQUEST, f"The form has too many parts: {error}.") from error
    except MultipartError as error:
        raise ServingError(ErrorCode.INVALID_REQUEST, f"The body is not a valid form: {error}.") from error


def _take(events: Generator[MultipartSegment | bytes | bytearray | None], parts: _Parts) -> None:
    for event in events:
        if event is None:
            parts.end()
        elif isinstance(event, MultipartSegment):
            parts.begin(event)
        else:
            parts.add(bytes(event))


def _form(parts: _Parts) -> AdapterForm:
    for name in FILES:
        if name not in parts.files:
            raise ServingError(ErrorCode.MISSING_PARAMETER, f"The form has no file '{name}'.", param=name)
    if not parts.fields.get("name"):
        raise ServingError(ErrorCode.MISSING_PARAMETER, "The form has no field 'name'.", param="name")
    activate = TRUTH.get(parts.fields.get("activate", b"true").decode("utf-8", "replace").lower())
    if activate is None:
        raise invalid_value("activate", "must be 'true' or 'false'.")
    return AdapterForm(parts.fields["name"].decode("utf-8", "replace"), parts.folder, activate)

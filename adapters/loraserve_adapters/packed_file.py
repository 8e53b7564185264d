"""The packed form as a file that can be mapped: prefix, JSON header, padding, payload from a multiple of 4096.

Prefix: 8 bytes of magic, version and header length as little-endian uint32, sha256 of the header. The header holds the
payload's size and sha256, so damage anywhere is noticed.
"""

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.dtypes import STORAGE, raw_bytes
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.packed import PackedAdapter

FORMAT_VERSION = 1
PAGE_BYTES = 4096

_MAGIC = b"LORAPACK"
_PREFIX = struct.Struct("<8sII32s")
_MAX_HEADER_BYTES = 64 * 1024 * 1024


def layout_fingerprint(groups: Sequence[Sequence[BaseModule]], dtype: str) -> str:
    """What `BaseLayout.fingerprint` must be: equal iff adapters packed for one base fit the other."""
    table = [
        [[member.name, member.in_features, member.out_features, member.weight_sha256] for member in group]
        for group in groups
    ]
    text = json.dumps(["loraserve layout", FORMAT_VERSION, dtype, table], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def packed_file_name(digest: str, layout: BaseLayout) -> str:
    return f"{digest}-{layout.fingerprint[:16]}-{layout.dtype}-v{FORMAT_VERSION}.packed"


def write_packed(packed: PackedAdapter, path: Path) -> None:
    """The file appears complete and synced, or not at all. Raises `OSError`."""
    header = _header_bytes(packed)
    prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(header), hashlib.sha256(header).digest())
    padding = bytes(_payload_start(len(header)) - len(prefix) - len(header))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(prefix + header + padding)
            file.write(raw_bytes(packed.payload))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def read_packed(path: Path, *, verify: bool = True, layout_fingerprint: str | None = None) -> PackedAdapter:
    """The payload is a read-only mapping of the file. Raises only `AdapterError`.

    verify: also compare the payload with its sha256 (reads all of it). layout_fingerprint: refuse another layout's.
    """
    try:
        with open(path, "rb") as file:
            header, payload_start, file_size = _read_header(file, path)
    except OSError as error:
        raise AdapterError("missing_file", f"{path.name} cannot be read: {error.strerror}", file=path.name) from None
    if layout_fingerprint is not None and header["layout_fingerprint"] != layout_fingerprint:
        raise AdapterError("layout_mismatch", f"{path.name} was packed for another base model", file=path.name)
    size_bytes = header["payload_size_bytes"]
    if payload_start + size_bytes != file_size:
        raise _damaged(path, f"{file_size} bytes, expected {payload_start + size_bytes}")
    payload = np.memmap(path, np.uint8, "r", payload_start, (size_bytes,))
    if verify and hashlib.sha256(raw_bytes(payload)).hexdigest() != header["payload_sha256"]:
        raise _damaged(path, "the payload differs from its sha256")
    return PackedAdapter(
        digest=header["digest"],
        layout_fingerprint=header["layout_fingerprint"],
        dtype=header["dtype"],
        max_lora_rank=header["max_lora_rank"],
        offset_a=np.array(header["offset_a"], np.int64),
        offset_b=np.array(header["offset_b"], np.int64),
        lora_rank=np.array(header["lora_rank"], np.int32),
        scaling=np.array(header["scaling"], np.float32),
        payload=payload,
    )


def _header_bytes(packed: PackedAdapter) -> bytes:
    fields = {
        "digest": packed.digest,
        "layout_fingerprint": packed.layout_fingerprint,
        "dtype": packed.dtype,
        "max_lora_rank": packed.max_lora_rank,
        "offset_a": packed.offset_a.tolist(),
        "offset_b": packed.offset_b.tolist(),
        "lora_rank": packed.lora_rank.tolist(),
        "scaling": packed.scaling.tolist(),
        "payload_size_bytes": packed.size_bytes,
        "payload_sha256": hashlib.sha256(raw_bytes(packed.payload)).hexdigest(),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _read_header(file: Any, path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, start of the payload, size of the file). Our own file: its sha256 vouches for the fields."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) != _PREFIX.size:
        raise _damaged(path, "too short")
    magic, version, length, sha256 = _PREFIX.unpack(prefix)
    if magic != _MAGIC or version != FORMAT_VERSION or length > _MAX_HEADER_BYTES:
        raise _damaged(path, f"not a packed adapter of version {FORMAT_VERSION}")
    header = file.read(length)
    if hashlib.sha256(header).digest() != sha256:
        raise _damaged(path, "the header differs from its sha256")
    fields = json.loads(header)
    if fields["dtype"] not in STORAGE:
        raise _damaged(path, f"unknown dtype {fields['dtype']}")
    return fields, _payload_start(length), os.fstat(file.fileno()).st_size


def _payload_start(header_length: int) -> int:
    return -(-(_PREFIX.size + header_length) // PAGE_BYTES) * PAGE_BYTES


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(path: Path, reason: str) -> AdapterError:
    return AdapterError("bad_packed_file", f"{path.name}: {reason}", file=path.name)

"""The packed form as a file that can be mapped: prefix, JSON header, padding, payload from a multiple of 4096.

Prefix: 8 bytes of magic, version and header length as little-endian uint32, sha256 of the header. The header holds the
payload's size and sha256, so damage anywhere is noticed.
"""

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.dtypes import STORAGE, raw_bytes
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.packed import PackedAdapter, PackedHead, PackedOwnTable, PackedTable, PackedTokens
from loraserve_adapters.sync_file import sync_file, sync_folder

FORMAT_VERSION = 2
MAGNITUDES_VERSION = 3
"""In the prefix of files with magnitudes, so that older readers refuse them instead of computing plain LoRA."""
HEAD_VERSION = 4
"""Likewise with a classifier's head, with or without magnitudes: older readers would take it for a text adapter."""
TOKENS_VERSION = 5
"""Likewise with tokens' rows, with or without the others: older readers would add the rows to the base's."""
TABLES_VERSION = 6
"""Likewise with own tables, with or without the others: older readers would compute with the base's."""
NEWEST_VERSION = TABLES_VERSION
PAGE_BYTES = 4096

_MAGIC = b"LORAPACK"
_PREFIX = struct.Struct("<8sII32s")
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_BLOCK_BYTES = 4 * 1024 * 1024
_NO_SHA256 = "0" * 64


def layout_fingerprint(groups: Sequence[Sequence[BaseModule]], dtype: str) -> str:
    """The value of `BaseLayout.fingerprint`: equal iff adapters packed for one base fit the other."""
    table = [
        [
            [member.name, member.in_features, member.out_features, member.weight_sha256]
            + ([] if member.bias_sha256 is None else [member.bias_sha256])
            + (["embedding"] if member.is_embedding else [])
            + (["tied"] if member.is_tied else [])
            + ([] if member.num_matrices is None else [member.num_matrices, member.expert_linears])
            for member in group
        ]
        for group in groups
    ]
    text = json.dumps(["loraserve layout", FORMAT_VERSION, dtype, table], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def packed_file_name(digest: str, layout: BaseLayout) -> str:
    return f"{digest}-{layout.fingerprint[:16]}-{layout.dtype}-v{FORMAT_VERSION}.packed"


class PackedFileWriter:
    """Writes the packed form to an open, empty file: the payload piece by piece in any order, then the header.

    What is never written stays a hole and reads as zeros. Raises `OSError`.
    """

    def __init__(self, descriptor: int, table: PackedTable, size_bytes: int) -> None:
        """size_bytes: of the payload."""
        self._descriptor = descriptor
        self._table = table
        self._size_bytes = size_bytes
        # The header's length does not depend on the digests that go into it at the end.
        self._start = _payload_start(len(_header_bytes(table, _NO_SHA256, size_bytes, _NO_SHA256)))
        os.ftruncate(descriptor, self._start + size_bytes)

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """offset_bytes: from the start of the payload."""
        position = 0
        while position < len(data):
            position += os.pwrite(self._descriptor, data[position:], self._start + offset_bytes + position)

    def finish(self, digest: str) -> None:
        """Afterwards the file is complete and synced. Reads the payload again, for its sha256."""
        header = _header_bytes(self._table, digest, self._size_bytes, self._payload_sha256())
        version = MAGNITUDES_VERSION if _has_magnitudes(self._table) else FORMAT_VERSION
        version = version if self._table.head is None else HEAD_VERSION
        version = TOKENS_VERSION if self._table.trained_tokens else version
        version = TABLES_VERSION if self._table.own_tables else version
        prefix = _PREFIX.pack(_MAGIC, version, len(header), hashlib.sha256(header).digest())
        os.pwrite(self._descriptor, prefix + header, 0)
        sync_file(self._descriptor)

    def _payload_sha256(self) -> str:
        payload = hashlib.sha256()
        block = memoryview(bytearray(min(_BLOCK_BYTES, self._size_bytes)))
        position = 0
        while position < self._size_bytes:
            part = block[: self._size_bytes - position]
            count = os.preadv(self._descriptor, [part], self._start + position)
            payload.update(part[:count])
            position += count
        return payload.hexdigest()


@contextmanager
def new_packed_file(path: Path) -> Iterator[int]:
    """Yields a descriptor of an empty file that becomes `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def write_packed(packed: PackedAdapter, path: Path) -> None:
    """The file appears complete and synced, or not at all. Raises `OSError`."""
    with new_packed_file(path) as descriptor:
        writer = PackedFileWriter(descriptor, packed.table, packed.size_bytes)
        writer.write(0, raw_bytes(packed.payload))
        writer.finish(packed.digest)


def read_packed(path: Path, *, verify: bool = True, layout_fingerprint: str | None = None) -> PackedAdapter:
    """The payload is a read-only mapping of the file. Raises only `AdapterError`.

    verify: also compare the payload with its sha256 (reads all of it). layout_fingerprint: refuse other layouts' files.
    """
    try:
        with open(path, "rb") as file:
            header, payload_start, file_size = _read_header(file, path)
            size_bytes = header["payload_size_bytes"]
            if layout_fingerprint is not None and header["layout_fingerprint"] != layout_fingerprint:
                raise AdapterError("layout_mismatch", f"{path.name} was packed for another base model", file=path.name)
            if payload_start + size_bytes != file_size:
                raise _damaged(path, f"{file_size} bytes, expected {payload_start + size_bytes}")
            # NOTE: maps the open file, not the path: by now there may be another file of this name, or none.
            payload = np.memmap(file, np.uint8, "r", payload_start, (size_bytes,))
    except OSError as error:
        raise AdapterError("missing_file", f"{path.name} cannot be read: {error.strerror}", file=path.name) from None
    if verify and hashlib.sha256(raw_bytes(payload)).hexdigest() != header["payload_sha256"]:
        raise _damaged(path, "the payload does not match its sha256")
    table = PackedTable(
        layout_fingerprint=header["layout_fingerprint"],
        dtype=header["dtype"],
        max_lora_rank=header["max_lora_rank"],
        offset_a=np.array(header["offset_a"], np.int64),
        offset_b=np.array(header["offset_b"], np.int64),
        offset_bias=np.array(header["offset_bias"], np.int64),
        offset_magnitude=np.array(header.get("offset_magnitude", [-1] * len(header["offset_b"])), np.int64),
        lora_rank=np.array(header["lora_rank"], np.int32),
        scaling=np.array(header["scaling"], np.float32),
        invocation_token_ids=tuple(header.get("invocation_token_ids", ())),
        head=PackedHead(*header["head"]) if "head" in header else None,
        trained_tokens=tuple(PackedTokens(member, tuple(ids)) for member, ids in header.get("trained_tokens", ())),
        own_tables=tuple(PackedOwnTable(*of) for of in header.get("own_tables", ())),
    )
    return PackedAdapter(header["digest"], table, payload)


def _header_bytes(table: PackedTable, digest: str, size_bytes: int, payload_sha256: str) -> bytes:
    fields = {
        "digest": digest,
        "layout_fingerprint": table.layout_fingerprint,
        "dtype": table.dtype,
        "max_lora_rank": table.max_lora_rank,
        "offset_a": table.offset_a.tolist(),
        "offset_b": table.offset_b.tolist(),
        "offset_bias": table.offset_bias.tolist(),
        "lora_rank": table.lora_rank.tolist(),
        "scaling": table.scaling.tolist(),
        "payload_size_bytes": size_bytes,
        "payload_sha256": payload_sha256,
        **({"offset_magnitude": table.offset_magnitude.tolist()} if _has_magnitudes(table) else {}),
        **({"invocation_token_ids": table.invocation_token_ids} if table.invocation_token_ids else {}),
        **({"head": astuple(table.head)} if table.head is not None else {}),
        **({"trained_tokens": [astuple(of) for of in table.trained_tokens]} if table.trained_tokens else {}),
        **({"own_tables": [astuple(of) for of in table.own_tables]} if table.own_tables else {}),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _has_magnitudes(table: PackedTable) -> bool:
    return bool((table.offset_magnitude >= 0).any())


def _read_header(file: Any, path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, start of the payload, size of the file). Our own file: its sha256 vouches for the fields."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) != _PREFIX.size:
        raise _damaged(path, "too short")
    magic, version, length, sha256 = _PREFIX.unpack(prefix)
    is_known = FORMAT_VERSION <= version <= NEWEST_VERSION
    if magic != _MAGIC or not is_known or length > _MAX_HEADER_BYTES:
        raise _damaged(path, f"not a packed adapter of version {FORMAT_VERSION} to {NEWEST_VERSION}")
    header = file.read(length)
    if hashlib.sha256(header).digest() != sha256:
        raise _damaged(path, "the header does not match its sha256")
    fields = json.loads(header)
    if fields["dtype"] not in STORAGE:
        raise _damaged(path, f"unknown dtype {fields['dtype']}")
    return fields, _payload_start(length), os.fstat(file.fileno()).st_size


def _payload_start(header_length: int) -> int:
    return -(-(_PREFIX.size + header_length) // PAGE_BYTES) * PAGE_BYTES


def _damaged(path: Path, reason: str) -> AdapterError:
    return AdapterError("bad_packed_file", f"{path.name}: {reason}", file=path.name)

"""Strict reader of safetensors: the header is judged before any data, tensors are copied, never mapped."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loraserve_adapters.dtypes import FROM_SAFETENSORS, STORAGE, raw_bytes
from loraserve_adapters.errors import AdapterError, shown, shown_name
from loraserve_adapters.files import open_regular, read_exactly
from loraserve_adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraserve_adapters.strict_json import parse_object

WEIGHTS_NAME = "adapter_model.safetensors"
LENGTH_BYTES = 8
"""The file starts with the header's length, unsigned little-endian."""

_MAX_DIMENSIONS = 8
_BLOCK_BYTES = 4 * 1024 * 1024
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: str
    """As in the file, e.g. "BF16"."""
    shape: tuple[int, ...]
    start: int
    """Byte offset from the start of the file."""
    size_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def header_end(first_bytes: bytes, file_size: int, limits: AdapterLimits = DEFAULT_LIMITS) -> int:
    """How many of the file's first bytes `parse_header` needs. first_bytes: at least 8."""
    if file_size > limits.max_weights_bytes:
        raise _refused(f"{file_size} bytes; at most {limits.max_weights_bytes} are accepted", "too_large")
    if len(first_bytes) < LENGTH_BYTES or file_size < LENGTH_BYTES:
        raise _refused("too short to hold a header")
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if length > limits.max_header_bytes:
        raise _refused(f"header of {length} bytes; at most {limits.max_header_bytes} are accepted", "too_large")
    if LENGTH_BYTES + length > file_size:
        raise _refused(f"header of {length} bytes in a file of {file_size} bytes")
    return LENGTH_BYTES + length


def parse_header(first_bytes: bytes, file_size: int, limits: AdapterLimits = DEFAULT_LIMITS) -> tuple[TensorEntry, ...]:
    """All tensors of the file, by position. Raises only `AdapterError`.

    Guaranteed: names differ, each entry's size is its shape times its item size, and the entries cover the rest of
    the file exactly, without holes or overlap.
    """
    end = header_end(first_bytes, file_size, limits)
    header = first_bytes[LENGTH_BYTES:end]
    if len(header) != end - LENGTH_BYTES:
        raise _refused(f"only {len(first_bytes)} bytes are available, but the header ends at byte {end}")
    if not header.startswith(b"{"):
        raise _refused("the header does not start with {")
    fields = _parse_json(header, limits)
    _check_metadata(fields.pop("__metadata__", {}))
    if len(fields) > limits.max_tensors:
        raise _too_many(limits)
    tensors = sorted(
        (_parse_entry(name, value, end) for name, value in fields.items()),
        key=lambda entry: (entry.start, entry.size_bytes),
    )
    position = end
    for entry in tensors:
        if entry.start != position:
            raise _refused(f"data starts at byte {entry.start}, expected {position}", key=entry.name)
        position += entry.size_bytes
    if position != file_size:
        raise _refused(f"the tensors end at byte {position}, but the file ends at byte {file_size}")
    return tuple(tensors)


def _parse_json(header: bytes, limits: AdapterLimits) -> dict[str, Any]:
    if header.count(b'"data_offsets"') > limits.max_tensors:
        raise _too_many(limits)
    try:
        return parse_object(
            header,
            file=WEIGHTS_NAME,
            code="bad_safetensors",
            max_nesting=3,
            max_objects=limits.max_tensors + 2,
        )
    except AdapterError as error:
        if error.code == "duplicate_key":
            raise AdapterError("duplicate_tensor", error.message, file=error.file, key=error.key) from None
        raise


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _refused("__metadata__ must map strings to strings")


def _parse_entry(name: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _refused("expected the fields dtype, shape and data_offsets", key=name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise _refused(f"unknown dtype {shown(dtype)}", "bad_dtype", key=name)
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_count(size) for size in shape):
        raise _refused(f"invalid shape {shown(shape)}", key=name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise _refused(f"invalid data_offsets {shown(offsets)}", key=name)
    size_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != size_bytes:
        raise _refused(
            f"{shown(shape)} of {dtype} takes {shown(size_bytes)} bytes, but data_offsets are {shown(offsets)}",
            key=name,
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], size_bytes)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _refused(reason: str, code: str = "bad_safetensors", key: str | None = None) -> AdapterError:
    where = WEIGHTS_NAME if key is None else f"{WEIGHTS_NAME}: {shown_name(key)}"
    return AdapterError(code, f"{where}: {reason}", file=WEIGHTS_NAME, key=key)


def _too_many(limits: AdapterLimits) -> AdapterError:
    return _refused(f"more than {limits.max_tensors} tensors", "too_large")


class SafetensorsFile:
    """An open file with its header judged; reads tensors in blocks of rows."""

    def __init__(self, descriptor: int, tensors: tuple[TensorEntry, ...]) -> None:
        self._descriptor = descriptor
        self.tensors = {entry.name: entry for entry in tensors}

    def row_blocks(self, entry: TensorEntry) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, block [rows, columns]) of a 2-D F32, F16 or BF16 tensor, about 4 MiB at a time.

        A block is a fresh copy with the dtype of `dtypes.STORAGE`. A 1-D tensor is one row.
        """
        dtype = STORAGE[FROM_SAFETENSORS[entry.dtype]]
        num_rows, num_columns = entry.shape if len(entry.shape) == 2 else (1, *entry.shape)
        row_bytes = num_columns * dtype.itemsize
        rows_per_block = max(1, _BLOCK_BYTES // max(1, row_bytes))
        for first in range(0, num_rows, rows_per_block):
            count = min(rows_per_block, num_rows - first)
            block = np.empty((count, num_columns), dtype)
            read_exactly(self._descriptor, raw_bytes(block), entry.start + first * row_bytes, WEIGHTS_NAME)
            yield first, block


@contextmanager
def open_weights(folder: Path, limits: AdapterLimits = DEFAULT_LIMITS) -> Iterator[SafetensorsFile]:
    """The folder's `adapter_model.safetensors`, closed on exit."""
    with open_weights_descriptor(folder, limits) as (descriptor, file_size):
        first_bytes = read_first_bytes(descriptor, file_size, limits)
        yield SafetensorsFile(descriptor, parse_header(first_bytes, file_size, limits))


@contextmanager
def open_weights_descriptor(folder: Path, limits: AdapterLimits = DEFAULT_LIMITS) -> Iterator[tuple[int, int]]:
    """(file descriptor, size in bytes), with nothing read yet."""
    if not os.path.lexists(folder / WEIGHTS_NAME) and os.path.lexists(folder / "adapter_model.bin"):
        reason = "missing; adapter_model.bin is a pickle and is never read: save as safetensors"
        remedy = "Load the adapter with PEFT, if you trust its source, and save it with safe_serialization=True."
        raise AdapterError("missing_file", f"{WEIGHTS_NAME}: {reason}", file=WEIGHTS_NAME, remedy=remedy)
    with open_regular(folder, WEIGHTS_NAME, limits) as opened:
        yield opened


def read_first_bytes(
    descriptor: int, file_size: int, limits: AdapterLimits = DEFAULT_LIMITS, *, num_available: int | None = None
) -> bytes:
    """The first bytes of an open file that `parse_header` needs. Raises only `AdapterError`.

    num_available: bytes of a file that is still arriving; None = all of them.
    """
    available = file_size if num_available is None else num_available
    first_bytes = _read(descriptor, min(LENGTH_BYTES, available))
    return _read(descriptor, min(header_end(first_bytes, file_size, limits), available))


def _read(descriptor: int, size: int) -> bytes:
    data = bytearray(size)
    read_exactly(descriptor, memoryview(data), 0, WEIGHTS_NAME)
    return bytes(data)

"""From a verified PEFT folder to the packed form, cached on disk."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.dtypes import FROM_SAFETENSORS, STORAGE, all_finite, convert, raw_bytes
from loraserve_adapters.errors import AdapterError, shown
from loraserve_adapters.limits import DEFAULT_LIMITS, Limits
from loraserve_adapters.packed import ALIGNMENT_BYTES, PackedAdapter
from loraserve_adapters.packed_file import packed_file_name, read_packed, write_packed
from loraserve_adapters.safetensors_file import WEIGHTS_NAME, SafetensorsFile, TensorEntry, open_weights
from loraserve_adapters.source import SourceAdapter, read_adapter


def load_and_pack(
    folder: Path, layout: BaseLayout, cache_dir: Path, *, limits: Limits = DEFAULT_LIMITS
) -> PackedAdapter:
    """Verifies the folder and returns its packed form as a mapping of a file in `cache_dir`, written if need be.

    Raises `AdapterError` where the adapter is refused, `OSError` where `cache_dir` cannot be written.
    """
    source = read_adapter(folder, layout, limits)
    path = cache_dir / packed_file_name(source.digest, layout)
    cached = _read_cached(path, source.digest, layout)
    if cached is not None:
        return cached
    cache_dir.mkdir(parents=True, exist_ok=True)
    write_packed(pack(source, layout, limits), path)
    return read_packed(path, layout_fingerprint=layout.fingerprint)


def _read_cached(path: Path, digest: str, layout: BaseLayout) -> PackedAdapter | None:
    """None where there is no file, or one that is damaged and so must be written again."""
    try:
        packed = read_packed(path, layout_fingerprint=layout.fingerprint)
    except AdapterError:
        return None
    return packed if packed.digest == digest else None


def pack(source: SourceAdapter, layout: BaseLayout, limits: Limits = DEFAULT_LIMITS) -> PackedAdapter:
    """Reads the tensors again, 4 MiB at a time, into one new buffer; refuses what changed since `read_adapter`."""
    modules = {module.target.module.name: module for module in source.modules}
    members = [member for group in layout.groups for member in group]
    present = [modules.get(member.name) for member in members]
    ranks = [0 if module is None else module.target.lora_rank for module in present]
    plan = plan_payload(layout.groups, ranks, layout.dtype)
    payload = np.zeros(plan.size_bytes, np.uint8)
    elements = payload.view(STORAGE[layout.dtype])
    with open_weights(source.folder, limits) as weights:
        writer = _Writer(weights, source, layout.dtype)
        for index, module in enumerate(present):
            if module is None:
                continue
            rank, member = ranks[index], members[index]
            a = _matrix(elements, plan.member_a[index], rank, member.in_features)
            b = _matrix(elements, int(plan.offset_b[index]), rank, member.out_features)
            writer.write(module.lora_a, a)
            writer.write(module.lora_b, b.T)
    return PackedAdapter(
        digest=source.digest,
        layout_fingerprint=layout.fingerprint,
        dtype=layout.dtype,
        max_lora_rank=max(ranks),
        offset_a=plan.offset_a,
        offset_b=plan.offset_b,
        lora_rank=np.array(ranks, np.int32),
        scaling=np.array([0.0 if module is None else module.target.scaling for module in present], np.float32),
        payload=payload,
    )


@dataclass(frozen=True, slots=True)
class PayloadPlan:
    """Where each matrix lies, in elements; G groups and M members in the layout's order."""

    offset_a: np.ndarray
    """int64 [G]; -1 = absent."""
    offset_b: np.ndarray
    """int64 [M]; -1 = absent."""
    member_a: tuple[int, ...]
    """[M]: each member's own A within its group's; -1 = absent."""
    size_bytes: int
    """A multiple of `ALIGNMENT_BYTES`."""


def plan_payload(groups: Iterable[Sequence[BaseModule]], lora_ranks: Sequence[int], dtype: str) -> PayloadPlan:
    """lora_ranks: [M], 0 = absent."""
    aligned = ALIGNMENT_BYTES // STORAGE[dtype].itemsize
    offset_a: list[int] = []
    offset_b: list[int] = []
    member_a: list[int] = []
    position = 0
    ranks = iter(lora_ranks)
    for group in groups:
        members = [(member, next(ranks)) for member in group]
        offset_a.append(position if any(rank for _, rank in members) else -1)
        for member, rank in members:
            member_a.append(position if rank else -1)
            position += rank * member.in_features
        position = _round_up(position, aligned)
        for member, rank in members:
            offset_b.append(position if rank else -1)
            position = _round_up(position + rank * member.out_features, aligned)
    return PayloadPlan(
        np.array(offset_a, np.int64),
        np.array(offset_b, np.int64),
        tuple(member_a),
        position * STORAGE[dtype].itemsize,
    )


class _Writer:
    """Copies tensors into the payload, in the packed dtype."""

    def __init__(self, weights: SafetensorsFile, source: SourceAdapter, dtype: str) -> None:
        self._weights = weights
        self._source = source
        self._dtype = dtype

    def write(self, entry: TensorEntry, target: np.ndarray) -> None:
        """target: a view of the payload with the entry's shape."""
        if self._weights.tensors.get(entry.name) != entry:
            raise self._refused("file_changed", entry, "changed after it was verified")
        source_dtype = FROM_SAFETENSORS[entry.dtype]
        digest = hashlib.sha256()
        for first, block in self._weights.row_blocks(entry):
            digest.update(raw_bytes(block))
            values = convert(block, source_dtype, self._dtype)
            if not all_finite(values, self._dtype):
                raise self._refused("not_finite", entry, f"holds values too large for the base model's {self._dtype}")
            target[first : first + len(block)] = values
        if digest.digest() != self._source.sha256[entry.name]:
            raise self._refused("file_changed", entry, "changed after it was verified")

    @staticmethod
    def _refused(code: str, entry: TensorEntry, reason: str) -> AdapterError:
        return AdapterError(code, f"{WEIGHTS_NAME}: {shown(entry.name)}: {reason}", file=WEIGHTS_NAME, key=entry.name)


def _matrix(elements: np.ndarray, offset: int, num_rows: int, num_columns: int) -> np.ndarray:
    return elements[offset : offset + num_rows * num_columns].reshape(num_rows, num_columns)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

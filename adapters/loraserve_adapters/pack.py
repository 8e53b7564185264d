"""Converts a verified PEFT folder into the packed form, cached on disk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.checks import Checks
from loraserve_adapters.content import read_content
from loraserve_adapters.digest import adapter_digest
from loraserve_adapters.dtypes import STORAGE, convert, raw_bytes
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.judge import JudgedAdapter
from loraserve_adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraserve_adapters.packed import (
    ALIGNMENT_BYTES,
    PackedAdapter,
    PackedHead,
    PackedOwnTable,
    PackedTable,
    PackedTokens,
)
from loraserve_adapters.packed_file import PackedFileWriter, new_packed_file, packed_file_name, read_packed
from loraserve_adapters.safetensors_file import WEIGHTS_NAME, TensorEntry, open_weights
from loraserve_adapters.source import SourceAdapter, read_adapter
from loraserve_adapters.trained_tokens import TrainedRows


def load_and_pack(
    folder: Path, layout: BaseLayout, cache_dir: Path, *, limits: AdapterLimits = DEFAULT_LIMITS
) -> PackedAdapter:
    """Verifies the folder and returns its packed form, mapped from a file in `cache_dir` that is written if needed.

    Raises `AdapterError` if the adapter is refused, `OSError` if `cache_dir` cannot be written.
    """
    source = read_adapter(folder, layout, limits)
    path = cache_dir / packed_file_name(source.digest, layout)
    cached = _read_cached(path, source.digest, layout)
    if cached is not None:
        return cached
    cache_dir.mkdir(parents=True, exist_ok=True)
    pack(source, layout, path, limits)
    return read_packed(path, layout_fingerprint=layout.fingerprint)


def _read_cached(path: Path, digest: str, layout: BaseLayout) -> PackedAdapter | None:
    """None if there is no file, or only a damaged one that must be written again."""
    try:
        packed = read_packed(path, layout_fingerprint=layout.fingerprint)
    except AdapterError:
        return None
    return packed if packed.digest == digest else None


def pack(source: SourceAdapter, layout: BaseLayout, path: Path, limits: AdapterLimits = DEFAULT_LIMITS) -> None:
    """Reads the tensors again, 4 MiB at a time, into a new file; refuses one that changed since `read_adapter`."""
    checks = Checks()
    with open_weights(source.folder, limits) as weights, new_packed_file(path) as descriptor:
        writer = PackedAdapterWriter(descriptor, source.judged, layout)
        hashed = read_content(source.judged, weights, layout, checks, sink=writer)
        checks.raise_first()
        if adapter_digest(source.config, hashed) != source.digest:
            reason = f"{WEIGHTS_NAME}: changed after it was verified"
            raise AdapterError("file_changed", reason, file=WEIGHTS_NAME)
        writer.finish(source.digest)


@dataclass(frozen=True, slots=True)
class _PlaceOfB:
    """Where a B goes, transposed; in elements."""

    start: int
    row_stride: int
    """Outputs of the weight, of which this B may have only a part."""
    num_experts: int
    """Experts whose columns are interleaved in this B."""


class PackedAdapterWriter:
    """Writes each tensor's rows where the packed form has them, in the base's dtype; holds one block at a time."""

    def __init__(self, descriptor: int, adapter: JudgedAdapter, layout: BaseLayout) -> None:
        modules = {module.target.module.name: module for module in adapter.modules}
        members = [member for group in layout.groups for member in group]
        present = [modules.get(member.name) for member in members]
        indices = {member.name: index for index, member in enumerate(members)}
        groups = [group_index for group_index, group in enumerate(layout.groups) for _ in group]
        trained = {indices[rows.tokens.module.name]: rows for rows in adapter.trained_rows}
        ranks = [0 if module is None else module.target.lora_rank for module in present]
        scaling = [0.0 if module is None else module.target.scaling for module in present]
        for index, rows in trained.items():
            ranks[index], scaling[index] = len(rows.tokens.token_ids), 1.0
        has_bias = [module is not None and any(part.bias for part in module.parts) for module in present]
        has_magnitude = [module is not None and adapter.config.use_dora for module in present]
        own = {indices[of.table.module.name]: of for of in adapter.own_tables}
        is_own = [index in own for index in range(len(members))]
        head = adapter.head
        num_head_values = 0 if head is None else head.num_elements
        plan = plan_payload(layout.groups, ranks, layout.dtype, has_bias, has_magnitude, is_own, num_head_values)
        table = PackedTable(
            layout_fingerprint=layout.fingerprint,
            dtype=layout.dtype,
            max_lora_rank=max(ranks),
            offset_a=plan.offset_a,
            offset_b=plan.offset_b,
            offset_bias=plan.offset_bias,
            offset_magnitude=plan.offset_magnitude,
            lora_rank=np.array(ranks, np.int32),
            scaling=np.array(scaling, np.float32),
            invocation_token_ids=adapter.config.invocation_token_ids,
            head=None if head is None else PackedHead(plan.offset_head, *head.shape),
            trained_tokens=tuple(PackedTokens(index, rows.tokens.token_ids) for index, rows in trained.items()),
            own_tables=tuple(
                PackedOwnTable(groups[index], index, plan.member_table[index], *members[index].weight_shape)
                for index in own
            ),
        )
        self._size_bytes = plan.size_bytes
        self._file = PackedFileWriter(descriptor, table, plan.size_bytes)
        self._dtype = layout.dtype
        self._item_bytes = STORAGE[layout.dtype].itemsize
        self._as_is: dict[str, tuple[int, ...]] = {}
        """First elements of tensors written untransposed: A, bias, magnitudes, head; tables and rows, maybe twice."""
        self._transposed: dict[str, _PlaceOfB] = {}
        for index, module in enumerate(present):
            if module is None:
                continue
            base, rank = module.target.module, module.target.lora_rank
            for part in module.parts:
                row = (part.expert or 0) * rank + part.first_rank
                self._as_is[part.lora_a.name] = (plan.member_a[index] + row * base.in_features,)
                start = int(plan.offset_b[index]) + row * base.out_features + part.first_output
                num_experts = base.num_matrices if part.expert is None else None
                place = _PlaceOfB(start, base.out_features, num_experts or 1)
                self._transposed[part.lora_b.name] = place
                if part.bias is not None:
                    self._as_is[part.bias.name] = (int(plan.offset_bias[index]),)
                if part.magnitude is not None:
                    self._as_is[part.magnitude.name] = (int(plan.offset_magnitude[index]),)
        if head is not None:
            self._as_is[head.name] = (plan.offset_head,)
        for index, of in own.items():
            self._as_is[of.entry.name] = (*self._as_is.get(of.entry.name, ()), plan.member_table[index])
        for index, rows in trained.items():
            places = plan.member_a[index], int(plan.offset_b[index])
            self._place_rows(rows, *(places if members[index].is_embedding else places[::-1]))

    def _place_rows(self, rows: TrainedRows, selector: int, start: int) -> None:
        """Writes the selector, whose rows have a 1 for their token. selector, start: first elements of the selector,
        [num_tokens, rows of the table], and of the trained rows, [num_tokens, hidden_size]."""
        tokens, one = rows.tokens, raw_bytes(convert(np.ones(1, np.float32), "float32", self._dtype))
        for row, token_id in enumerate(tokens.token_ids):
            self._file.write((selector + row * tokens.module.weight_shape[0] + token_id) * self._item_bytes, one)
        self._as_is[rows.entry.name] = (*self._as_is.get(rows.entry.name, ()), start)

    def write(self, entry: TensorEntry, first_row: int, block: np.ndarray) -> None:
        if entry.name in self._as_is:
            for start in self._as_is[entry.name]:
                offset = start * self._item_bytes + first_row * block.shape[1] * block.itemsize
                self._file.write(offset, raw_bytes(block))
            return
        place = self._transposed[entry.name]
        columns = block.T.reshape(-1, place.num_experts, len(block)).swapaxes(0, 1).reshape(-1, len(block))
        if len(block) == place.row_stride:
            self._file.write(place.start * self._item_bytes, raw_bytes(np.ascontiguousarray(columns)))
            return
        for index, row in enumerate(np.ascontiguousarray(columns)):
            offset = place.start + index * place.row_stride + first_row
            self._file.write(offset * self._item_bytes, raw_bytes(row))

    @property
    def size_bytes(self) -> int:
        """Size of the payload."""
        return self._size_bytes

    def finish(self, digest: str) -> None:
        """Afterwards the file is complete and synced."""
        self._file.finish(digest)


def largest_selectors_bytes(layout: BaseLayout, limits: AdapterLimits = DEFAULT_LIMITS) -> int:
    """Largest size of the selectors of trained tokens, of all tables together: see `packed`."""
    tables = (module for group in layout.groups for module in group if module.is_of_vocabulary)
    num_rows = sum(module.weight_shape[0] for module in tables)
    return limits.max_trained_tokens * num_rows * STORAGE[layout.dtype].itemsize


@dataclass(frozen=True, slots=True)
class PayloadPlan:
    """Where each matrix lies, in elements; G groups and M members in the layout's order."""

    offset_a: np.ndarray
    """int64 [G]; -1 = absent."""
    offset_b: np.ndarray
    """int64 [M]; -1 = absent."""
    offset_bias: np.ndarray
    """int64 [M]; -1 = absent."""
    offset_magnitude: np.ndarray
    """int64 [M]; -1 = absent."""
    member_a: tuple[int, ...]
    """[M]: each member's own A within its group's; -1 = absent."""
    member_table: tuple[int, ...]
    """[M]: own tables; -1 = absent."""
    offset_head: int
    """-1 = absent."""
    size_bytes: int
    """A multiple of `ALIGNMENT_BYTES`."""


def plan_payload(
    groups: Iterable[Sequence[BaseModule]],
    lora_ranks: Sequence[int],
    dtype: str,
    has_bias: Sequence[bool] = (),
    has_magnitude: Sequence[bool] = (),
    has_table: Sequence[bool] = (),
    num_head_values: int = 0,
) -> PayloadPlan:
    """lora_ranks: [M], 0 = absent. has_bias, has_magnitude, has_table: [M], or empty for none. num_head_values: 0 = no
    head."""
    item_bytes = STORAGE[dtype].itemsize
    aligned, per_float32 = ALIGNMENT_BYTES // item_bytes, STORAGE["float32"].itemsize // item_bytes
    offset_a: list[int] = []
    offset_b: list[int] = []
    offset_bias: list[int] = []
    offset_magnitude: list[int] = []
    member_a: list[int] = []
    position = 0
    member_table: list[int] = []
    nowhere = [False] * len(lora_ranks)
    rest = iter(zip(lora_ranks, has_bias or nowhere, has_magnitude or nowhere, has_table or nowhere, strict=True))
    for group in groups:
        members = [(member, *next(rest)) for member in group]
        offset_a.append(position if any(rank for _, rank, *_ in members) else -1)
        for member, rank, *_ in members:
            member_a.append(position if rank else -1)
            position += rank * (member.num_matrices or 1) * member.in_features
        position = _round_up(position, aligned)
        for member, rank, is_biased, is_dora, is_own in members:
            offset_b.append(position if rank else -1)
            position = _round_up(position + rank * (member.num_matrices or 1) * member.out_features, aligned)
            offset_bias.append(position if is_biased else -1)
            position = _round_up(position + is_biased * member.out_features, aligned)
            offset_magnitude.append(position if is_dora else -1)
            position = _round_up(position + is_dora * 2 * member.out_features * per_float32, aligned)
            member_table.append(position if is_own else -1)
            num_rows, hidden_size = member.weight_shape
            position = _round_up(position + is_own * num_rows * hidden_size, aligned)
    offset_head = position if num_head_values else -1
    position = _round_up(position + num_head_values * per_float32, aligned)
    return PayloadPlan(
        np.array(offset_a, np.int64),
        np.array(offset_b, np.int64),
        np.array(offset_bias, np.int64),
        np.array(offset_magnitude, np.int64),
        tuple(member_a),
        tuple(member_table),
        offset_head,
        position * item_bytes,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

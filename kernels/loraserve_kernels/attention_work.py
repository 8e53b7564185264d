"""Work lists of the GPU's attention kernels, built on the host with the batch: which program computes what.

List sizes depend on shapes alone, so a CUDA graph captured with one list serves every list of the same shape.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch

SPLIT_KEYS = 128
"""Fewest keys worth a separate part: each part costs a row of partial results per head, written and read again."""

APPEND_ROWS = 16
"""Rows of a tile whose keys are also split: the end of a prompt whose beginning was cached, or drafts to verify. With
one program for all keys of such a tile, most of the GPU would be idle."""

FEW_ROWS = 256
"""If sequences with several rows have at most this many in total, all are cut into tiles of `APPEND_ROWS`: as prefill
tiles, with 32 query heads, they would give programs to only half of an H200's SMs."""

PREFILL_ROWS = 128
"""Rows of a prefill tile. The kernel cuts rows * query heads per kv head into query tiles, so any group fills them."""

PROGRAMS_PER_SM = 4
"""Programs of the decode kernel that fit on an SM together: compiled for Hopper, at head_dim 128 in bfloat16, one takes
39 KiB of shared memory and 128 registers per thread, `paged_decode`'s limit. Each has 32 KiB of K and V in flight;
bandwidth times latency is 30 KiB per SM."""


@dataclass(slots=True)
class AttentionWork:
    """The lists of one step, for all layers regardless of their windows. Unused entries come last and are -1."""

    decode_splits: Tensor
    """int32 [num_splits, 4]: (sequence, 0, part, num_parts) for each sequence with one row, its parts adjacent and
    ascending. A part is a share of the keys that the row sees in a layer, computed on the device from `context_lens`: a
    list stays correct while contexts grow, and only its balance suffers."""
    append_splits: Tensor
    """int32 [num_splits, 4]: (sequence, first_row, part, num_parts), the same for tiles of at most `APPEND_ROWS` rows,
    from sequences with 2 to `APPEND_ROWS` rows, or from all with more than one row if those have at most `FEW_ROWS` in
    total."""
    prefill_tiles: Tensor
    """int32 [num_tiles, 3]: (sequence, first_row, end_row), at most `PREFILL_ROWS` rows of any other sequence, counted
    from its first row; tiles with the most keys first."""


def splits_for_device(device: torch.device, num_kv_heads: int) -> int:
    """num_splits for the functions below: as many as fill the device. num_kv_heads: of one layer, on this device."""
    if device.type != "cuda":
        return 8  # the interpreter: only correctness matters
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, PROGRAMS_PER_SM * num_sms // num_kv_heads)


def decode_capacity(num_sequences: int, max_context: int, num_splits: int) -> int:
    """Length of `decode_splits`: one entry per sequence plus num_splits, at most as many as contexts can use."""
    return _split_capacity(num_sequences, max_context, num_splits)


def append_capacity(num_rows: int, num_sequences: int, max_context: int, num_splits: int) -> int:
    """Length of `append_splits` for num_rows in any distribution over at most num_sequences."""
    return _split_capacity(min(num_rows // 2, num_rows // APPEND_ROWS + num_sequences), max_context, num_splits)


def prefill_capacity(num_rows: int, num_sequences: int) -> int:
    """Length of `prefill_tiles` for num_rows in any distribution over at most num_sequences."""
    return min(num_rows // (APPEND_ROWS + 1), num_rows // PREFILL_ROWS + num_sequences)


def fill_decode_splits(splits: np.ndarray, context_lens: np.ndarray, num_rows: np.ndarray, num_splits: int) -> None:
    """Write `AttentionWork.decode_splits`, with the part length with which the device should finish soonest.

    splits: int32 [capacity, 4]. context_lens, num_rows: as in `StepBatch`. num_splits: as for the capacity. Raises
    `ValueError` if there are fewer splits than sequences with one row.
    """
    sequence = np.flatnonzero(num_rows == 1)
    _fill_splits(splits, sequence, np.zeros_like(sequence), context_lens[sequence], num_splits)


def fill_append_splits(splits: np.ndarray, context_lens: np.ndarray, num_rows: np.ndarray, num_splits: int) -> None:
    """Write `AttentionWork.append_splits`; arguments and errors as for `fill_decode_splits`."""
    sequence, first_row, end_row = _cut(np.where(_is_appended(num_rows), num_rows, 0), APPEND_ROWS)
    _fill_splits(splits, sequence, first_row, (context_lens - num_rows)[sequence] + end_row, num_splits)


def fill_prefill_tiles(tiles: np.ndarray, context_lens: np.ndarray, num_rows: np.ndarray) -> None:
    """Write `AttentionWork.prefill_tiles`, tiles with the most keys first, so that no long tile starts last.

    tiles: int32 [num_tiles, 3]. Raises `ValueError` if there are too few entries.
    """
    sequence, first_row, end_row = _cut(np.where((num_rows > 1) & ~_is_appended(num_rows), num_rows, 0), PREFILL_ROWS)
    total = len(sequence)
    if total > len(tiles):
        raise mismatch("the number of tiles", len(tiles), f"at least {total} for these rows")
    order = np.argsort((num_rows - context_lens)[sequence] - end_row, kind="stable")
    tiles[:total] = np.stack((sequence, first_row, end_row), axis=1)[order]
    tiles[total:] = -1


def make_attention_work(context_lens: Tensor, num_rows: Tensor, num_splits: int) -> AttentionWork:
    """The work of a batch that came without. Reads both tensors on the host, so it waits for their device.

    num_splits: from `splits_for_device`. Raises `RuntimeError` during the capture of a CUDA graph, which such a read
    would break.
    """
    device = context_lens.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("batch.attention is None, expected its `AttentionWork` while a CUDA graph is captured")
    lens, rows = context_lens.cpu().numpy(), num_rows.cpu().numpy()
    appended, prefilled = rows_of_lists(rows)
    longest = int(lens.max(initial=0))
    decode = np.empty((decode_capacity(int((rows == 1).sum()), longest, num_splits), 4), np.int32)
    append = np.empty((append_capacity(int(appended.sum()), len(appended), longest, num_splits), 4), np.int32)
    tiles = np.empty((prefill_capacity(int(prefilled.sum()), len(prefilled)), 3), np.int32)
    fill_decode_splits(decode, lens, rows, num_splits)
    fill_append_splits(append, lens, rows, num_splits)
    fill_prefill_tiles(tiles, lens, rows)
    return AttentionWork(*(torch.from_numpy(array).to(device) for array in (decode, append, tiles)))


def rows_of_lists(num_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows per sequence in `append_splits`, the same in `prefill_tiles`), for the capacities of the two."""
    is_appended = _is_appended(num_rows)
    return num_rows[is_appended], num_rows[(num_rows > 1) & ~is_appended]


def _is_appended(num_rows: np.ndarray) -> np.ndarray:
    several = num_rows > 1
    if int(num_rows[several].sum()) <= FEW_ROWS:
        return several
    return several & (num_rows <= APPEND_ROWS)


def _cut(num_rows: np.ndarray, tile_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sequence, first_row, end_row) of tiles of at most tile_rows."""
    counts = _ceil_div(num_rows, tile_rows)
    sequence = np.repeat(np.arange(len(num_rows)), counts)
    first_row = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_rows
    return sequence, first_row, np.minimum(first_row + tile_rows, num_rows[sequence])


def _split_capacity(num_entries: int, max_context: int, num_splits: int) -> int:
    return min(num_entries + num_splits, num_entries * max(1, -(-max_context // SPLIT_KEYS)))


def _fill_splits(
    splits: np.ndarray, sequence: np.ndarray, first_row: np.ndarray, num_keys: np.ndarray, num_splits: int
) -> None:
    if len(sequence) > len(splits):
        raise mismatch("the number of splits", len(splits), f"at least {len(sequence)} for these rows")
    units = np.maximum(_ceil_div(num_keys, SPLIT_KEYS), 1)
    num_parts = _ceil_div(units, _best_units_per_part(units, len(splits), num_splits))
    total = int(num_parts.sum())
    part = np.arange(total) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    columns = (np.repeat(sequence, num_parts), np.repeat(first_row, num_parts), part, np.repeat(num_parts, num_parts))
    splits[:total] = np.stack(columns, axis=1)
    splits[total:] = -1


def _best_units_per_part(units: np.ndarray, capacity: int, num_splits: int) -> int:
    """The faster of two: as many parts as run at once, which suits contexts of one length, or as many as fit the list.

    With 8 kv heads, 16 contexts of 8192 keys are 64 parts of 16 units each, in one round of 66; 80 parts of 13 units
    would take two rounds.
    """

    def duration(units_per_part: int) -> int:
        num_rounds = -(-int(_ceil_div(units, units_per_part).sum()) // max(1, num_splits))
        return num_rounds * units_per_part

    num_parallel = min(capacity, max(len(units), num_splits))
    return min((_units_per_part(units, num_parallel), _units_per_part(units, capacity)), key=duration)


def _units_per_part(units: np.ndarray, num_splits: int) -> int:
    """The fewest units per part with which all contexts together need at most num_splits parts."""
    least, enough = max(1, -(-int(units.sum()) // max(1, num_splits))), int(units.max(initial=1))
    while least < enough:
        middle = (least + enough) // 2
        if int(_ceil_div(units, middle).sum()) <= num_splits:
            enough = middle
        else:
            least = middle + 1
    return least


def _ceil_div(numbers: np.ndarray, divisor: int) -> np.ndarray:
    return -(-numbers // divisor)

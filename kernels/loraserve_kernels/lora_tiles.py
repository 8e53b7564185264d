"""The rows of each adapter cut into tiles: the work lists of the GPU's LoRA kernels, built on the host.

List sizes depend on shapes alone, so a CUDA graph captured with one list serves every list of the same shape.
"""

import numpy as np
import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch
from loraserve_kernels.step_batch import Segments

LORA_TILE_ROWS = 16
"""Of `lora_shrink`: the fewest rows a tensor core multiplies. Most segments of a decode batch have one to a few."""

EXPAND_TILE_ROWS = 4
"""Of `lora_expand` for batches of up to `EXPAND_MAX_ROWS` rows, for which it does not use tensor cores."""

EXPAND_MAX_ROWS = 128
"""Throughput relative to the base model on an H200, tiles of 4 rows (of 16): 64 rows of 64 adapters 0.66 (0.54), of
one 0.78 (0.79); 128 rows of 64 adapters 0.61 (0.55), of one 0.69 (0.73); 256 rows of 64 adapters 0.68 (0.67), of one
0.72 (0.82)."""

PREFILL_TILE_ROWS = 64
"""More rows per tile mean fewer reads of the adapter's matrices; Hopper's wgmma multiplies 64 rows."""

DECODE_MAX_ROWS = 512
"""Batches of up to this many rows use tiles of `LORA_TILE_ROWS`, larger ones tiles of `PREFILL_TILE_ROWS`.

NOTE: no step that runs as a graph has more rows. A graph has room for one tile per row, since each row may have its own
adapter, and if few adapters share the rows nearly all tiles are unused. Only with small tiles does `lora_expand` start
a small number of programs that go through all tiles. With large ones it would start 215,000 programs for 320 rows of a
Llama-3-8B layer, and multiply 64 rows even if each adapter has only one.
"""


def tile_rows(num_rows: int) -> int:
    """Maximum rows per tile of `lora_shrink`, for a batch of num_rows."""
    return LORA_TILE_ROWS if num_rows <= DECODE_MAX_ROWS else PREFILL_TILE_ROWS


def expand_tile_rows(num_rows: int) -> int:
    """Maximum rows per tile of `lora_expand`: at most `tile_rows`."""
    return EXPAND_TILE_ROWS if num_rows <= EXPAND_MAX_ROWS else tile_rows(num_rows)


def tile_capacity(num_rows: int, max_segments: int) -> int:
    """The most tiles that num_rows in at most max_segments segments can need.

    Each segment needs a tile for its first row; each further tile accounts for a full tile of rows.
    """
    num_segments = min(max_segments, num_rows)
    return num_segments + (num_rows - num_segments) // expand_tile_rows(num_rows)


def fill_tiles(tiles: np.ndarray, start: np.ndarray, adapter_slot: np.ndarray, num_rows: int) -> None:
    """Write `Segments.tiles` for segments given as in `Segments`; unused entries become (-1, entries in use, 0).

    tiles: int32 [num_tiles, 6]. num_rows: of the tensors that the kernels will get; in a padded batch, more than the
    segments have. Raises `ValueError` if there are too few tiles or the segments have more than num_rows rows.
    """
    # NOTE: kernels derive the tile size from their tensors' number of rows. With another num_rows here, rows are lost.
    if int(start[-1]) > num_rows:
        raise mismatch("num_rows", num_rows, f"at least the segments' {int(start[-1])}")
    _fill(tiles[:, :3], start, adapter_slot, tile_rows(num_rows))
    _fill(tiles[:, 3:], start, adapter_slot, expand_tile_rows(num_rows))


def _fill(tiles: np.ndarray, start: np.ndarray, adapter_slot: np.ndarray, rows: int) -> None:
    """Write one of the two lists, int32 [num_tiles, 3], with tiles of at most `rows` rows."""
    first, end = start[:-1], start[1:]
    counts = np.where(adapter_slot >= 0, -(-(end - first) // rows), 0)
    total = int(counts.sum())
    if total > len(tiles):
        raise mismatch("the number of tiles", len(tiles), f"at least {total} for these segments")
    index_in_segment = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    tile_first = np.repeat(first, counts) + index_in_segment * rows
    tiles[:total, 0] = np.repeat(adapter_slot, counts)
    tiles[:total, 1] = tile_first
    tiles[:total, 2] = np.minimum(tile_first + rows, np.repeat(end, counts))
    tiles[total:] = (-1, total, 0)


def tiles_of(segments: Segments, num_rows: int) -> Tensor:
    """`segments.tiles`, or new ones if there are none: building them reads the segments on the host.

    Raises `RuntimeError` during the capture of a CUDA graph, which such a read would break.
    """
    if segments.tiles is not None:
        return segments.tiles
    device = segments.start.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "segments.tiles is None, expected a work list (see fill_tiles) while a CUDA graph is captured"
        )
    tiles = np.empty((tile_capacity(num_rows, segments.adapter_slot.shape[0]), 6), np.int32)
    fill_tiles(tiles, segments.start.cpu().numpy(), segments.adapter_slot.cpu().numpy(), num_rows)
    return torch.from_numpy(tiles).to(device)


def check_tiles(tiles: Tensor, x: Tensor) -> None:
    """Raise `ValueError` unless tiles are dense int32 [num_tiles, 6] on x's device."""
    if tiles.dim() != 2 or tiles.shape[1] != 6:
        raise mismatch("segments.tiles", list(tiles.shape), "[num_tiles, 6]")
    if tiles.dtype != torch.int32 or not tiles.is_contiguous():
        raise mismatch("segments.tiles", tiles.dtype, "dense int32")
    if tiles.device != x.device:
        raise mismatch("segments.tiles.device", tiles.device, f"{x.device}, as x")

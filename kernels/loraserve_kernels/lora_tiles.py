"""The rows of each adapter cut into tiles: the work list of the GPU's LoRA kernels, built on the host.

Sizes depend on shapes alone, so that a CUDA graph captured with one list serves every list of the same shape.
"""

import numpy as np
import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch
from loraserve_kernels.step_batch import Segments

LORA_TILE_ROWS = 16
"""Of `lora_shrink`: the fewest that a tensor core multiplies. Most segments of a decode batch have one to a few."""

EXPAND_TILE_ROWS = 4
"""Of `lora_expand`, for batches of up to `EXPAND_MAX_ROWS` rows: it does without tensor cores there."""

EXPAND_MAX_ROWS = 128
"""Throughput over the base model's on an H200, with tiles of 4 rows (and of 16): 64 rows of 64 adapters 0.66 (0.54), of
one 0.78 (0.79); 128 rows of 64 adapters 0.61 (0.55), of one 0.69 (0.73); 256 rows of 64 adapters 0.68 (0.67), of one
0.72 (0.82)."""

PREFILL_TILE_ROWS = 64
"""With more rows the adapter's matrices are read once for as many; 64 are what Hopper's wgmma multiplies."""

DECODE_MAX_ROWS = 512
"""Up to here tiles have `LORA_TILE_ROWS`, above `PREFILL_TILE_ROWS`.

NOTE: no decode step that is a graph has more rows. A graph has a tile for each row, since each may have its own
adapter, and nearly all are unused where few adapters share the rows: only for low tiles `lora_expand` gives a bounded
number of programs all tiles there are. It would start 215,000 for 320 rows of a Llama-3-8B's layer, and multiply 64
rows where each adapter has one.
"""


def tile_rows(num_rows: int) -> int:
    """The most rows of a tile of `lora_shrink`, for a batch of num_rows."""
    return LORA_TILE_ROWS if num_rows <= DECODE_MAX_ROWS else PREFILL_TILE_ROWS


def expand_tile_rows(num_rows: int) -> int:
    """The most rows of a tile of `lora_expand`: as many or fewer."""
    return EXPAND_TILE_ROWS if num_rows <= EXPAND_MAX_ROWS else tile_rows(num_rows)


def tile_capacity(num_rows: int, max_segments: int) -> int:
    """The most tiles that num_rows in at most max_segments segments can need.

    Each segment has a tile for its first row, and each tile more takes as many rows as a tile has.
    """
    num_segments = min(max_segments, num_rows)
    return num_segments + (num_rows - num_segments) // expand_tile_rows(num_rows)


def fill_tiles(tiles: np.ndarray, start: np.ndarray, adapter_slot: np.ndarray, num_rows: int) -> None:
    """Write `Segments.tiles` for the segments given as in `Segments`; what is left over is (-1, entries in use, 0).

    tiles: int32 [num_tiles, 6]. num_rows: of the tensors the kernels will get, which for a padded batch is more than
    the segments have. Raises `ValueError` when there are too few tiles or too many rows.
    """
    # NOTE: the kernels take the tiles' height from their own number of rows. Another num_rows here would lose rows.
    if int(start[-1]) > num_rows:
        raise mismatch("num_rows", num_rows, f"at least the segments' {int(start[-1])}")
    _fill(tiles[:, :3], start, adapter_slot, tile_rows(num_rows))
    _fill(tiles[:, 3:], start, adapter_slot, expand_tile_rows(num_rows))


def _fill(tiles: np.ndarray, start: np.ndarray, adapter_slot: np.ndarray, rows: int) -> None:
    """One of the lists, int32 [num_tiles, 3], whose tiles have so many rows at most."""
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
    """`segments.tiles`, built on the spot where a runner has not: that reads the segments on the host.

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

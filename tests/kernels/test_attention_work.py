import math
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loraserve_kernels.attention_work import (
    APPEND_ROWS,
    FEW_ROWS,
    PREFILL_ROWS,
    SPLIT_KEYS,
    append_capacity,
    decode_capacity,
    fill_append_splits,
    fill_decode_splits,
    fill_prefill_tiles,
    make_attention_work,
    prefill_capacity,
    splits_for_device,
)

MAX_CONTEXT = 131_072


def filled(fill, shape, context_lens, num_rows, *num_splits) -> np.ndarray:
    """The filled list; its memory held other values before."""
    entries = np.full(shape, 77, np.int32)
    fill(entries, np.array(context_lens, np.int32), np.array(num_rows, np.int32), *num_splits)
    return entries


def used(entries: np.ndarray) -> np.ndarray:
    """The entries in use; requires that all unused ones are at the end."""
    count = int((entries[:, 0] >= 0).sum())
    assert (entries[count:] == -1).all()
    return entries[:count]


def decode_splits(context_lens, num_splits) -> np.ndarray:
    shape = (decode_capacity(len(context_lens), MAX_CONTEXT, num_splits), 4)
    return used(filled(fill_decode_splits, shape, context_lens, [1] * len(context_lens), num_splits))


def rows_of(tiles: np.ndarray) -> list[tuple[int, int]]:
    """Every (sequence, row) in tiles, whose columns are (sequence, first_row, end_row)."""
    return sorted((int(sequence), row) for sequence, first, end in tiles for row in range(first, end))


def units(keys: int) -> int:
    return math.ceil(keys / SPLIT_KEYS)


def longest_part(splits: np.ndarray, context_lens) -> int:
    """In units of `SPLIT_KEYS`."""
    return max(math.ceil(units(context_lens[sequence]) / num_parts) for sequence, _, _, num_parts in splits)


contexts = st.lists(st.integers(1, MAX_CONTEXT), min_size=1, max_size=40)
rows_and_prefixes = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 5000)), min_size=1, max_size=20)


@given(contexts, st.integers(0, 100))
def test_all_parts_of_each_sequence_are_listed_adjacent_and_in_order(context_lens, num_splits):
    splits = decode_splits(context_lens, num_splits)
    expected = []
    for sequence in range(len(context_lens)):
        num_parts = int(splits[splits[:, 0] == sequence][0, 3])
        expected += [[sequence, 0, part, num_parts] for part in range(num_parts)]
        assert num_parts <= units(context_lens[sequence])
    assert splits.tolist() == expected


@given(contexts, st.integers(0, 100))
def test_parts_finish_no_later_than_the_shortest_parts_that_fit_the_list(context_lens, num_splits):
    capacity, at_a_time = len(context_lens) + num_splits, max(1, num_splits)

    def num_parts(length: int) -> int:
        return sum(math.ceil(units(context) / length) for context in context_lens)

    shortest = next(length for length in count(1) if num_parts(length) <= capacity)
    splits = decode_splits(context_lens, num_splits)
    duration = math.ceil(len(splits) / at_a_time) * longest_part(splits, context_lens)
    assert duration <= math.ceil(num_parts(shortest) / at_a_time) * shortest


@pytest.mark.parametrize(("num_seqs", "num_parts"), [(1, 64), (16, 64), (32, 64), (64, 64), (66, 66), (128, 128)])
def test_contexts_of_equal_length_are_cut_into_about_as_many_parts_as_run_at_once(num_seqs, num_parts):
    assert len(decode_splits([8192] * num_seqs, 66)) == num_parts


def test_one_long_context_is_split_beside_many_short_ones():
    context_lens = [MAX_CONTEXT] + [100] * 255
    splits = decode_splits(context_lens, 66)
    assert (splits[:, 0] == 0).sum() == 64
    assert longest_part(splits, context_lens) * SPLIT_KEYS == 2048


def test_decode_capacity_excludes_parts_that_short_contexts_cannot_use():
    assert decode_capacity(3, 4096, 0) == 3
    assert decode_capacity(3, SPLIT_KEYS, 500) == 3
    assert decode_capacity(3, 4 * SPLIT_KEYS, 500) == 12
    assert decode_capacity(0, 4096, 500) == 0


@given(rows_and_prefixes, st.integers(0, 100))
def test_every_row_is_in_exactly_one_list_exactly_once(rows_and_prefixes, num_splits):
    num_rows = [rows for rows, _ in rows_and_prefixes]
    context_lens = [rows + prefix for rows, prefix in rows_and_prefixes]
    num_seqs, total = len(num_rows), sum(num_rows)
    decode_length = decode_capacity(num_seqs, MAX_CONTEXT, num_splits)
    append_length = append_capacity(total, num_seqs, MAX_CONTEXT, num_splits)
    decode = used(filled(fill_decode_splits, (decode_length, 4), context_lens, num_rows, num_splits))
    append = used(filled(fill_append_splits, (append_length, 4), context_lens, num_rows, num_splits))
    prefill = used(filled(fill_prefill_tiles, (prefill_capacity(total, num_seqs), 3), context_lens, num_rows))
    tiles = [(sequence, 0, 1) for sequence in decode[decode[:, 2] == 0, 0]]
    for sequence, first, _, _ in append[append[:, 2] == 0]:
        tiles.append((sequence, first, min(first + APPEND_ROWS, num_rows[sequence])))
    tiles += [tuple(tile) for tile in prefill]
    assert rows_of(tiles) == [(sequence, row) for sequence, rows in enumerate(num_rows) for row in range(rows)]
    assert all(0 < end - first <= PREFILL_ROWS for _, first, end in prefill)
    keys = [context_lens[sequence] - num_rows[sequence] + end for sequence, _, end in prefill]
    assert keys == sorted(keys, reverse=True)


def test_a_sequences_number_of_rows_determines_its_list():
    lens, rows = torch.tensor([10, 500, 7, 300, 300, 16, 17]), torch.tensor([1, 500, 0, 1, 2, 16, 17])
    work = make_attention_work(lens.int(), rows.int(), num_splits=2)
    assert work.decode_splits.tolist() == [[0, 0, 0, 1], [3, 0, 0, 3], [3, 0, 1, 3], [3, 0, 2, 3]]
    assert work.append_splits.tolist() == [[4, 0, 0, 3], [4, 0, 1, 3], [4, 0, 2, 3], [5, 0, 0, 1], [-1] * 4]
    assert work.prefill_tiles[:3].tolist() == [[1, 384, 500], [1, 256, 384], [1, 128, 256]]
    assert work.prefill_tiles[3:].tolist() == [[1, 0, 128], [6, 0, 17], [-1, -1, -1]]


def test_a_batch_with_few_rows_in_total_is_not_prefilled_in_large_tiles():
    lens = torch.tensor([200, FEW_ROWS, 1])
    work = make_attention_work(lens.int(), torch.tensor([40, FEW_ROWS - 40, 1]).int(), num_splits=0)
    assert len(work.prefill_tiles) == 0
    assert used(work.append_splits.numpy())[:4].tolist() == [[0, 0, 0, 1], [0, 16, 0, 1], [0, 32, 0, 1], [1, 0, 0, 1]]
    work = make_attention_work(lens.int(), torch.tensor([41, FEW_ROWS - 40, 1]).int(), num_splits=0)
    assert len(used(work.prefill_tiles.numpy())) == 3
    assert len(work.append_splits) == 0


def test_refuses_lists_that_are_too_short():
    with pytest.raises(ValueError, match="splits is 1, expected at least 2"):
        filled(fill_decode_splits, (1, 4), [5, 5], [1, 1], 1)
    with pytest.raises(ValueError, match="splits is 2, expected at least 3"):
        filled(fill_append_splits, (2, 4), [5, 18], [2, 18], 1)
    with pytest.raises(ValueError, match="tiles is 2, expected at least 3"):
        filled(fill_prefill_tiles, (2, 3), [300], [300])


def test_sequences_without_rows_get_empty_lists():
    none = torch.zeros(1, dtype=torch.int32)
    work = make_attention_work(none, none, num_splits=3)
    for entries in (work.decode_splits, work.append_splits, work.prefill_tiles):
        assert len(entries) == 0
        assert entries.dtype == torch.int32


def test_the_number_of_splits_is_positive_on_a_cpu():
    assert splits_for_device(torch.device("cpu"), num_kv_heads=8) > 0

"""Changes to logits before a token is chosen, as tensors: allowed tokens, bias, banned tokens, penalties."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IS_ALLOWED, IS_BANNED = 1, 2
"""Bits of `LogitEdits.marks`."""
IN_PROMPT = 1 << 30
"""Bit of `LogitEdits.token_counts`; the bits below count the token in the output."""


@dataclass(slots=True)
class RowEdits:
    """Edits of one row. Token ids outside the vocabulary are ignored."""

    allowed_token_ids: Sequence[int] = ()
    """Empty = all."""
    bias: Mapping[int, float] = field(default_factory=dict)
    banned_token_ids: Iterable[int] = ()
    """Stop tokens of a sequence below its minimum length."""
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    count_row: int = -1
    """Row of the token counts; -1 = no penalties."""


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """A row's edits of E single tokens, each listed once, all within the vocabulary."""

    token_ids: NDArray[np.int32]
    biases: NDArray[np.float32]
    marks: NDArray[np.int8]
    """As `LogitEdits.marks`."""
    addresses: tuple[int, int, int] = field(init=False)
    """Addresses of the arrays."""

    def __post_init__(self) -> None:
        arrays = self.token_ids, self.biases, self.marks
        object.__setattr__(self, "addresses", tuple(array.ctypes.data for array in arrays))


@dataclass(slots=True)
class LogitEdits:
    """Edits of R rows, applied in order: allowed tokens, bias, bans; repetition, then frequency and presence penalty.

    Row r lists tokens `start[r]` to `start[r + 1]`, each once.
    """

    is_edited: Tensor
    """int8 [R]: 0 = the row's logits are used unchanged."""
    is_blank: Tensor
    """int8 [R]: 1 = only the allowed tokens can be chosen."""
    start: Tensor
    """int32 [R + 1]."""
    token_ids: Tensor
    """int32 [E]."""
    biases: Tensor
    """float32 [E]."""
    marks: Tensor
    """int8 [E]: `IS_ALLOWED` | `IS_BANNED`."""
    repetition: Tensor
    """float32 [R]."""
    frequency: Tensor
    """float32 [R]."""
    presence: Tensor
    """float64 [R]."""
    count_row: Tensor
    """int32 [R]: row of `token_counts`, different for each row with penalties; -1 = no penalties."""
    token_counts: Tensor
    """int32 [P, V]: how often each token is in a sequence's output, | `IN_PROMPT` if it is in the prompt."""


def list_tokens(row: RowEdits, vocab_size: int) -> ListedTokens:
    """The tokens of a row's allowed tokens, biases and bans."""
    found: dict[int, tuple[float, int]] = dict.fromkeys(row.allowed_token_ids, (0.0, IS_ALLOWED))
    for token_id, bias in row.bias.items():
        found[token_id] = (bias, found.get(token_id, (0.0, 0))[1])
    for token_id in row.banned_token_ids:
        bias, mark = found.get(token_id, (0.0, 0))
        found[token_id] = (bias, mark | IS_BANNED)
    inside = [token_id for token_id in found if 0 <= token_id < vocab_size]
    return ListedTokens(
        np.array(inside, np.int32),
        np.array([found[token_id][0] for token_id in inside], np.float32),
        np.array([found[token_id][1] for token_id in inside], np.int8),
    )


def pack_edits(rows: Sequence[RowEdits], token_counts: Tensor) -> LogitEdits:
    """Edits of rows, on the device of `token_counts`, which is not copied."""
    device, vocab_size = token_counts.device, token_counts.shape[1]
    listed = [list_tokens(row, vocab_size) for row in rows]
    starts = np.cumsum([0, *(len(each.token_ids) for each in listed)])
    is_edited = [
        bool(row.allowed_token_ids) or row.count_row >= 0 or len(each.token_ids) > 0
        for row, each in zip(rows, listed, strict=True)
    ]
    return LogitEdits(
        is_edited=torch.tensor(is_edited, dtype=torch.int8, device=device),
        is_blank=torch.tensor([bool(row.allowed_token_ids) for row in rows], dtype=torch.int8, device=device),
        start=torch.tensor(starts, dtype=torch.int32, device=device),
        token_ids=torch.from_numpy(np.concatenate([each.token_ids for each in listed])).to(device),
        biases=torch.from_numpy(np.concatenate([each.biases for each in listed])).to(device),
        marks=torch.from_numpy(np.concatenate([each.marks for each in listed])).to(device),
        repetition=torch.tensor([row.repetition for row in rows], dtype=torch.float32, device=device),
        frequency=torch.tensor([row.frequency for row in rows], dtype=torch.float32, device=device),
        presence=torch.tensor([row.presence for row in rows], dtype=torch.float64, device=device),
        count_row=torch.tensor([row.count_row for row in rows], dtype=torch.int32, device=device),
        token_counts=token_counts,
    )


def fill_token_counts(counts: Tensor, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
    """Initialize a sequence's row of `LogitEdits.token_counts`: int32 [V]. Does not wait for the device."""
    counts.zero_()
    counts.index_fill_(0, _in_vocab(prompt_token_ids, counts), IN_PROMPT)
    outputs = _in_vocab(output_token_ids, counts)
    counts.index_add_(0, outputs, torch.ones_like(outputs, dtype=counts.dtype))


def _in_vocab(token_ids: Sequence[int], counts: Tensor) -> Tensor:
    """int64, on the device of `counts`; copied from page-locked memory, because copies from other memory block."""
    found = torch.tensor(token_ids, dtype=torch.int64)
    found = found[(found >= 0) & (found < counts.shape[0])]
    return found.pin_memory().to(counts.device, non_blocking=True) if counts.is_cuda else found


def count_tokens_reference(edits: LogitEdits, token_ids: Tensor, is_finite: Tensor) -> None:
    """Add the chosen tokens to the counts of rows with penalties, in place.

    token_ids int64 [R], is_finite bool [R]: as `sample` returns them. Rows that are not finite are not counted.
    """
    is_counted = (edits.count_row >= 0) & is_finite
    edits.token_counts[edits.count_row[is_counted].long(), token_ids[is_counted]] += 1


def edit_row_reference(logits: Tensor, edits: LogitEdits, row: int) -> Tensor:
    """float32 [V]: one row of logits [V] with its edits applied."""
    logits = logits.float()
    listed = slice(int(edits.start[row]), int(edits.start[row + 1]))
    token_ids, marks = edits.token_ids[listed].long(), edits.marks[listed]
    edited = torch.full_like(logits, -torch.inf) if edits.is_blank[row] else logits.clone()
    allowed = token_ids[(marks & IS_ALLOWED) > 0]
    edited[allowed] = logits[allowed]
    edited[token_ids] += edits.biases[listed]
    edited[token_ids[(marks & IS_BANNED) > 0]] = -torch.inf
    if edits.count_row[row] < 0:
        return edited
    counts = edits.token_counts[edits.count_row[row]]
    num_outputs = counts & (IN_PROMPT - 1)
    repetition = edits.repetition[row]
    frequency = (edits.frequency[row] * num_outputs.float()).double()
    subtrahend = (frequency + edits.presence[row] * (num_outputs > 0)).float()
    penalised = torch.where(edited > 0, edited / repetition, edited * repetition) - subtrahend
    return torch.where(counts > 0, penalised, edited)

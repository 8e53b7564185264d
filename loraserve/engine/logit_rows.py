"""The passes over a whole vocabulary that sampling needs; only small arrays leave them.

NOTE: what a row yields depends on that row alone, bit for bit, whatever batch it is in. On the CPU each row is a pass
of its own in numpy: torch's elementwise kernels treat the end of each thread's share differently, so `exp` of a row
would depend on where the row lies in the batch. It is also faster: temperature, softmax and sums over 64 x 151936 took
29 ms in torch and 8 ms in numpy (2 EPYC cores), and there are no OpenMP barriers to wait at: with the cores shared,
torch took 180 ms for them in chunks of 8 rows.

Tokens are dealt to *lanes*: lane l of L holds tokens l, l + L, l + 2L, ... so that a reduction per lane is a running
elementwise maximum or sum of contiguous stretches. Lanes narrow a search from the vocabulary to a few tokens.
"""

from collections.abc import Callable
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LANE_LENGTH = 64
"""Tokens per lane. 32 to 128 cost the same at 16000 and 151936 tokens; 256 is 1.5 times slower."""

_MINUS_INF_BITS = 0xFF80
"""Of bfloat16; as unsigned numbers, only NaNs of negative sign are larger."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class LogitRows(Protocol):
    """Logits [R, V], V = the vocabulary. Row ids and token ids are int64 in range; what is returned is on the host.

    Except for `argmax`, a row that is asked about has a finite maximum (so no NaN and no +inf).
    """

    vocab_size: int
    num_lanes: int

    def argmax(self) -> tuple[Ints, Floats]:
        """Per row the lowest id of a maximal logit, and that logit; NaN counts as the largest."""
        ...

    def lane_max(self, row_ids: Ints) -> Floats:
        """[n, L]."""
        ...

    def lane_mass(self, row_ids: Ints, peaks: Floats, temperatures: Floats, floors: Floats) -> Floats:
        """[n, L]: the sum of exp((logit - peak) / temperature) over a lane's logits that are at least `floor`."""
        ...

    def at_least(self, row_ids: Ints, thresholds: Floats) -> tuple[Ints, Ints, Floats]:
        """(index into row_ids, token id, logit) of each logit >= its row's threshold, ordered by index, then id."""
        ...

    def count_above(self, row_ids: Ints, values: Floats) -> Ints:
        """Per row the number of logits > its value."""
        ...

    def gather(self, row_ids: Ints, token_ids: Ints) -> Floats:
        """logits[row_ids[i], token_ids[i]], any one shape."""
        ...

    def put(self, row_ids: Ints, token_ids: Ints, values: Floats) -> None:
        """Write them; only to what `copy_rows` returned. No (row, token) twice."""
        ...

    def copy_rows(self, row_ids: Ints, is_blank: NDArray[np.bool_]) -> Self:
        """A float32 copy of these rows that `put` may write to; a blank row is all -inf instead."""
        ...


def open_rows(logits: Tensor, vocab_size: int) -> LogitRows:
    """The first `vocab_size` columns of `logits`, not written to; float32 and bfloat16 are not copied. No gradients."""
    if logits.dtype == torch.float16:
        logits = logits.float()
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"logits are {logits.dtype}; the sampler takes float32, bfloat16 or float16")
    if not logits.is_cpu:
        return DeviceRows(logits[:, :vocab_size])
    # Cut in numpy: every operation of torch costs 15 to 50 us in a step, whose weights have driven its code from the
    # caches.
    rows = (logits.view(torch.uint16) if logits.dtype == torch.bfloat16 else logits).numpy()
    return HostRows(rows if rows.shape[1] == vocab_size else rows[:, :vocab_size])


class HostRows:
    """`LogitRows` in numpy, one row at a time. `logits`: float32, or uint16 holding bfloat16's bits."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[1]
        self.num_lanes = -(-self.vocab_size // LANE_LENGTH)
        self._is_bfloat16 = logits.dtype == np.uint16

    def tensor(self) -> Tensor:
        """Not copied."""
        rows = torch.from_numpy(self.logits)
        return rows.view(torch.bfloat16) if self._is_bfloat16 else rows

    def argmax(self) -> tuple[Ints, Floats]:
        if not self._is_bfloat16:
            token_ids = self.logits.argmax(-1)
            return token_ids, np.take_along_axis(self.logits, token_ids[:, None], 1)[:, 0]
        # Positive bfloat16s are ordered as their bits are, and what is negative has negative bits: 16 x 16,000 logits
        # took 15 us so and 59 us widened. A row without a positive logit, or with a NaN of negative sign, is widened.
        bits = self.logits.view(np.int16)
        token_ids = bits.argmax(-1)
        row_ids = np.arange(len(bits))
        for row_id in np.flatnonzero((bits[row_ids, token_ids] <= 0) | (self.logits.max(-1) > _MINUS_INF_BITS)):
            token_ids[row_id] = self._row(row_id).argmax()
        return token_ids, self.gather(row_ids, token_ids)

    def lane_max(self, row_ids: Ints) -> Floats:
        maxima = np.empty((len(row_ids), self.num_lanes), dtype=np.float32)
        for row_id, out in zip(row_ids, maxima, strict=True):
            self._reduce_lanes(np.maximum, self._row(row_id), out)
        return maxima

    def lane_mass(self, row_ids: Ints, peaks: Floats, temperatures: Floats, floors: Floats) -> Floats:
        masses = np.empty((len(row_ids), self.num_lanes), dtype=np.float32)
        weights = np.empty(self.vocab_size, dtype=np.float32)
        inverse_temperatures = np.float32(1) / temperatures
        with np.errstate(over="ignore"):  # towards -inf, when the temperature is tiny
            for index, row_id in enumerate(row_ids):
                row = self._row(row_id)
                np.subtract(row, peaks[index], out=weights)
                if temperatures[index] != 1:
                    np.multiply(weights, inverse_temperatures[index], out=weights)
                np.exp(weights, out=weights)
                if floors[index] > -np.inf:
                    np.multiply(weights, row >= floors[index], out=weights)
                self._reduce_lanes(np.add, weights, masses[index])
        return masses

    def at_least(self, row_ids: Ints, thresholds: Floats) -> tuple[Ints, Ints, Floats]:
        token_ids = []
        values = []
        for row_id, threshold in zip(row_ids, thresholds, strict=True):
            row = self._row(row_id)
            token_ids.append(np.flatnonzero(row >= threshold))
            values.append(row[token_ids[-1]])
        indices = np.repeat(np.arange(len(row_ids)), [len(ids) for ids in token_ids])
        return indices, np.concatenate(token_ids), np.concatenate(values)

    def count_above(self, row_ids: Ints, values: Floats) -> Ints:
        pairs = zip(row_ids, values, strict=True)
        return np.array([np.count_nonzero(self._row(row_id) > value) for row_id, value in pairs], dtype=np.int64)

    def gather(self, row_ids: Ints, token_ids: Ints) -> Floats:
        values = self.logits[row_ids, token_ids]
        return _widen_bfloat16(values) if self._is_bfloat16 else values.astype(np.float32, copy=False)

    def put(self, row_ids: Ints, token_ids: Ints, values: Floats) -> None:
        self.logits[row_ids, token_ids] = values

    def copy_rows(self, row_ids: Ints, is_blank: NDArray[np.bool_]) -> "HostRows":
        copy = self.logits[row_ids]
        if self._is_bfloat16:
            copy = _widen_bfloat16(copy)  # all rows at once: 16 x 16,000 took 0.1 ms, one by one 0.2
        copy[is_blank] = -np.inf
        return HostRows(copy)

    def _row(self, row_id: np.int64 | int) -> Floats:
        row = self.logits[row_id]
        return _widen_bfloat16(row) if self._is_bfloat16 else row

    def _reduce_lanes(self, reduction: np.ufunc, row: Floats, out: Floats) -> None:
        num_whole = self.vocab_size // self.num_lanes * self.num_lanes
        reduction.reduce(row[:num_whole].reshape(-1, self.num_lanes), axis=0, out=out)
        rest = out[: self.vocab_size - num_whole]
        reduction(rest, row[num_whole:], out=rest)


def _widen_bfloat16(bits: NDArray[np.uint16]) -> Floats:
    words = bits.astype(np.uint32)
    np.left_shift(words, 16, out=words)
    return words.view(np.float32)


class DeviceRows:
    """`LogitRows` in torch, all rows at a time, for a GPU: there an element's value does not depend on its place."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[1]
        self.num_lanes = -(-self.vocab_size // LANE_LENGTH)

    def argmax(self) -> tuple[Ints, Floats]:
        values, token_ids = self.logits.max(-1)
        return token_ids.cpu().numpy(), _to_host(values)

    def lane_max(self, row_ids: Ints) -> Floats:
        return _to_host(self._reduce_lanes(torch.amax, torch.maximum, self._rows(row_ids)))

    def lane_mass(self, row_ids: Ints, peaks: Floats, temperatures: Floats, floors: Floats) -> Floats:
        rows = self._rows(row_ids).float()
        weights = rows - self._column(peaks)
        weights.mul_(self._column(np.float32(1) / temperatures)).exp_()
        if (floors > -np.inf).any():
            weights.mul_(rows >= self._column(floors))
        return _to_host(self._reduce_lanes(torch.sum, torch.add, weights))

    def at_least(self, row_ids: Ints, thresholds: Floats) -> tuple[Ints, Ints, Floats]:
        rows = self._rows(row_ids)
        indices, token_ids = torch.nonzero(rows >= self._column(thresholds), as_tuple=True)
        return indices.cpu().numpy(), token_ids.cpu().numpy(), _to_host(rows[indices, token_ids])

    def count_above(self, row_ids: Ints, values: Floats) -> Ints:
        return torch.count_nonzero(self._rows(row_ids) > self._column(values), dim=-1).cpu().numpy()

    def gather(self, row_ids: Ints, token_ids: Ints) -> Floats:
        return _to_host(self.logits[self._to_device(row_ids), self._to_device(token_ids)])

    def put(self, row_ids: Ints, token_ids: Ints, values: Floats) -> None:
        self.logits[self._to_device(row_ids), self._to_device(token_ids)] = self._to_device(values)

    def copy_rows(self, row_ids: Ints, is_blank: NDArray[np.bool_]) -> "DeviceRows":
        copy = self._rows(row_ids).to(torch.float32, copy=True)
        return DeviceRows(copy.masked_fill_(self._column(is_blank), -torch.inf))

    def _rows(self, row_ids: Ints) -> Tensor:
        if len(row_ids) == len(self.logits) and (row_ids == np.arange(len(row_ids))).all():
            return self.logits
        return self.logits.index_select(0, self._to_device(row_ids))

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.logits.device)

    def _column(self, values: np.ndarray) -> Tensor:
        return self._to_device(values)[:, None]

    def _reduce_lanes(
        self, reduce: Callable[..., Tensor], combine: Callable[[Tensor, Tensor], Tensor], rows: Tensor
    ) -> Tensor:
        num_whole = self.vocab_size // self.num_lanes * self.num_lanes
        lanes = reduce(rows[:, :num_whole].unflatten(1, (-1, self.num_lanes)), dim=1)
        rest = lanes[:, : self.vocab_size - num_whole]
        rest.copy_(combine(rest, rows[:, num_whole:]))
        return lanes


def _to_host(values: Tensor) -> Floats:
    return values.to("cpu", torch.float32).numpy()

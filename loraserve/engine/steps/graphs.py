"""Steps as captured graphs: for each of several sizes, one for the base model alone and one with adapters."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from loraserve_kernels.lora_tiles import DECODE_MAX_ROWS
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from loraserve.engine.adapters.arrival import StepArrivals
from loraserve.engine.device.accelerator import Accelerator

MAX_GRAPH_ROWS = DECODE_MAX_ROWS
"""With more rows, the GPU computes for longer than the host takes to launch. Not above `DECODE_MAX_ROWS`: see there."""
PROMPT_SIZES = (32, 64, 128, 192, 256, 384, MAX_GRAPH_ROWS)
"""Fewer sizes than for decode steps: rows are nearly free until products take longer than reading weights, at some 200
rows on an H200, and each graph makes the start longer."""


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What a graph computes; smaller steps are padded to it."""

    num_rows: int
    num_seqs: int
    """Sequences, which is also the number of rows to sample. In a decode step the same as num_rows; less in a step with
    prompts, because at least one sequence has more than one row."""

    @property
    def is_decode(self) -> bool:
        return self.num_seqs == self.num_rows


class GraphSizes:
    """The sizes of the graphs, and which one a step uses. A step that fits a graph is always a replay of it."""

    def __init__(self, decode: Sequence[int], prompts: Sequence[int], max_num_seqs: int) -> None:
        """decode: rows of steps in which each sequence has one row; prompts: rows of other steps. Both ascending."""
        self._decode = decode
        self._prompts = prompts
        self._max_num_seqs = max_num_seqs

    @classmethod
    def up_to(cls, max_num_rows: int, max_num_seqs: int) -> "GraphSizes":
        return cls(_decode_sizes(min(max_num_rows, max_num_seqs)), _prompt_sizes(max_num_rows), max_num_seqs)

    def all(self) -> list[GraphSize]:
        """All sizes, the one with most rows to sample first."""
        decode = [GraphSize(num_rows, num_rows) for num_rows in reversed(self._decode)]
        return decode + [self._with_prompts(num_rows) for num_rows in reversed(self._prompts)]

    def of(self, num_rows: int, num_seqs: int, num_sampled: int) -> GraphSize | None:
        """The smallest size that fits such a step; None if no graph does."""
        if num_rows == num_seqs == num_sampled:
            found = _at_least(self._decode, num_rows)
            return None if found is None else GraphSize(found, found)
        found = _at_least(self._prompts, num_rows)
        if found is None:
            return None
        size = self._with_prompts(found)
        return size if max(num_seqs, num_sampled) <= size.num_seqs else None

    def _with_prompts(self, num_rows: int) -> GraphSize:
        return GraphSize(num_rows, min(num_rows - 1, self._max_num_seqs))


NO_GRAPHS = GraphSizes((), (), 0)


def _decode_sizes(max_num_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then so close together that at most a few rows are padding, up to the largest step there can be."""
    limit = min(max_num_rows, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, MAX_GRAPH_ROWS + 1, 64)]
    return (*(size for size in sizes if size < limit), limit)


def _prompt_sizes(max_num_rows: int) -> tuple[int, ...]:
    limit = min(max_num_rows, MAX_GRAPH_ROWS)
    return (*(size for size in PROMPT_SIZES if size < limit), limit) if limit > 1 else ()


def _at_least(sizes: Sequence[int], num_rows: int) -> int | None:
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None


class CaptureError(Exception):
    """A step does something that cannot be recorded; the message says what."""


class StepGraphs:
    """Graphs that read the batch builder's tensors and write their logits to one buffer."""

    def __init__(self, accelerator: Accelerator, sizes: GraphSizes) -> None:
        self._accelerator = accelerator
        self._sizes = sizes
        self._replays: dict[tuple[GraphSize, bool], Callable[[], None]] = {}
        self._logits = torch.empty(0)

    def capture(
        self,
        forward: Callable[[StepBatch], Tensor],
        graph_batch: Callable[[GraphSize, bool], StepBatch],
        has_adapters: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        """graph_batch(size, has_adapter) returns the batch to capture. progress: called with (graphs done, total).

        Raises `CaptureError`.
        """
        kinds = (False, True) if has_adapters else (False,)
        keys = [(size, has_adapter) for size in self._sizes.all() for has_adapter in kinds]
        for index, (size, has_adapter) in enumerate(keys):
            self._capture(forward, graph_batch(size, has_adapter), (size, has_adapter))
            progress(index + 1, len(keys))

    def _capture(self, forward: Callable[[StepBatch], Tensor], batch: StepBatch, key: tuple[GraphSize, bool]) -> None:
        if not self._replays:
            # No other graph has more logits. The first run also does all one-time setup.
            logits = forward(batch)
            self._logits = torch.empty_like(logits)

        def step() -> None:
            self._logits[: key[0].num_seqs].copy_(forward(batch))

        try:
            self._replays[key] = self._accelerator.capture(step)
        except RuntimeError as error:
            cause = _first_cause(error)
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise CaptureError(str(cause).partition("\n")[0]) from error

    def try_replay(self, batch: StepBatch, arrivals: StepArrivals | None = None) -> Tensor | None:
        """Logits [R, vocab], valid until the next replay; None if no graph fits the batch.

        The batch must be the builder's newest. A graph may read any layer's adapters, so it waits for all `arrivals`.
        """
        if batch.needs_modules:
            return None
        num_sampled = len(batch.sampled_rows)
        size = self._sizes.of(len(batch.token_ids), len(batch.context_lens), num_sampled)
        if size is None:
            return None
        if arrivals is not None:
            arrivals.before_all()
        self._replays[size, batch.segments.has_adapter]()
        return self._logits[:num_sampled]


def _first_cause(error: BaseException) -> BaseException:
    """Ending a failed capture raises another error, which says only that it failed; this finds the first one."""
    while error.__context__ is not None:
        error = error.__context__
    return error

"""Steps as captured graphs: one for each of some sizes, for the base model alone and with adapters."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from loraserve.engine.adapters.arrival import StepArrivals
from loraserve.engine.device.accelerator import Accelerator

MAX_GRAPH_ROWS = 512
"""With more, the GPU computes for longer than the host takes to launch."""
PROMPT_SIZES = (32, 64, 128, 192, 256, 384, MAX_GRAPH_ROWS)
"""Fewer than of decode steps: rows are nearly free until products take longer than reading weights, some 200 on an
H200, and each graph takes a part of the start."""


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What a graph computes; steps with less of it are padded."""

    num_rows: int
    num_seqs: int
    """Sequences, and rows to sample. In a decode step as many as rows; where there are prompts fewer, as one has more
    rows than one."""

    @property
    def is_decode(self) -> bool:
        return self.num_seqs == self.num_rows


class GraphSizes:
    """Which graphs there are, and which one a step is for: what one is for is a replay of it."""

    def __init__(self, decode: Sequence[int], prompts: Sequence[int], max_num_seqs: int) -> None:
        """decode, prompts: rows of steps in which each sequence has one, and of others; ascending."""
        self._decode = decode
        self._prompts = prompts
        self._max_num_seqs = max_num_seqs

    @classmethod
    def up_to(cls, max_num_rows: int, max_num_seqs: int) -> "GraphSizes":
        return cls(_decode_sizes(min(max_num_rows, max_num_seqs)), _prompt_sizes(max_num_rows), max_num_seqs)

    def all(self) -> list[GraphSize]:
        """The one with most rows to sample first."""
        decode = [GraphSize(num_rows, num_rows) for num_rows in reversed(self._decode)]
        return decode + [self._with_prompts(num_rows) for num_rows in reversed(self._prompts)]

    def of(self, num_rows: int, num_seqs: int, num_sampled: int) -> GraphSize | None:
        """The smallest that holds such a step; None where it is none of a graph."""
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
    """1, 2, 4, 8, then so close that a few rows are padded at most, up to what there can be."""
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
    """A step does what cannot be recorded; the message says what."""


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
        """graph_batch(size, has_adapter) gives the batch to capture. progress: (graphs done, of how many).

        Raises `CaptureError`.
        """
        kinds = (False, True) if has_adapters else (False,)
        keys = [(size, has_adapter) for size in self._sizes.all() for has_adapter in kinds]
        for index, (size, has_adapter) in enumerate(keys):
            self._capture(forward, graph_batch(size, has_adapter), (size, has_adapter))
            progress(index + 1, len(keys))

    def _capture(self, forward: Callable[[StepBatch], Tensor], batch: StepBatch, key: tuple[GraphSize, bool]) -> None:
        if not self._replays:
            # No other has more logits. A first run in full also sets up what is set up once.
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
        """Logits [R, vocab], valid until the next replay; None for a batch that is none of a graph, as one of whose
        rows more than logits is wanted.

        The batch must be the builder's newest. A graph reads any layer's adapters, so all `arrivals` are waited for.
        """
        if batch.pooled_rows is not None:
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
    """The end of a capture that has failed fails too, and says no more than that."""
    while error.__context__ is not None:
        error = error.__context__
    return error

"""Decode steps as captured graphs: one for each of some batch sizes, for the base model alone and with adapters."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from loraserve.engine.accelerator import Accelerator
from loraserve.engine.adapter_arrival import StepArrivals

MAX_GRAPH_ROWS = 512
"""With more, the GPU computes for longer than the host takes to launch."""


def graph_sizes(max_num_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then so close that a few rows are padded at most, up to what there can be."""
    limit = min(max_num_rows, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, MAX_GRAPH_ROWS + 1, 64)]
    return (*(size for size in sizes if size < limit), limit)


def graph_size(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest that holds so many rows."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None


class CaptureError(Exception):
    """A step does what cannot be recorded; the message says what."""


class DecodeGraphs:
    """Graphs that read the batch builder's tensors and write their logits to one buffer."""

    def __init__(self, accelerator: Accelerator, sizes: Sequence[int]) -> None:
        self._accelerator = accelerator
        self._sizes = sizes
        self._replays: dict[tuple[int, bool], Callable[[], None]] = {}
        self._logits = torch.empty(0)

    def capture(
        self,
        forward: Callable[[StepBatch], Tensor],
        graph_batch: Callable[[int, bool], StepBatch],
        has_adapters: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        """graph_batch(num_rows, has_adapter) gives the batch to capture. progress: (graphs done, of how many).

        Raises `CaptureError`.
        """
        kinds = (False, True) if has_adapters else (False,)
        keys = [(size, has_adapter) for size in reversed(self._sizes) for has_adapter in kinds]
        for index, (size, has_adapter) in enumerate(keys):
            self._capture(forward, graph_batch(size, has_adapter), (size, has_adapter))
            progress(index + 1, len(keys))

    def _capture(self, forward: Callable[[StepBatch], Tensor], batch: StepBatch, key: tuple[int, bool]) -> None:
        if not self._replays:
            # The first graph is the largest. A first run in full also sets up what is set up once.
            logits = forward(batch)
            self._logits = torch.empty_like(logits)

        def step() -> None:
            self._logits[: key[0]].copy_(forward(batch))

        try:
            self._replays[key] = self._accelerator.capture(step)
        except RuntimeError as error:
            cause = _first_cause(error)
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise CaptureError(str(cause).partition("\n")[0]) from error

    def try_replay(self, batch: StepBatch, arrivals: StepArrivals | None = None) -> Tensor | None:
        """Logits [R, vocab], valid until the next replay; None for a batch that is no decode step or too large.

        The batch must be the builder's newest. A graph reads any layer's adapters, so all `arrivals` are waited for.
        """
        num_rows = len(batch.context_lens)
        if len(batch.token_ids) != num_rows or len(batch.sampled_rows) != num_rows:
            return None
        size = graph_size(self._sizes, num_rows)
        if size is None:
            return None
        if arrivals is not None:
            arrivals.before_all()
        self._replays[size, batch.segments.has_adapter]()
        return self._logits[:num_rows]


def _first_cause(error: BaseException) -> BaseException:
    """The end of a capture that has failed fails too, and says no more than that."""
    while error.__context__ is not None:
        error = error.__context__
    return error

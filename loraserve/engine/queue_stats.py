"""Counts the engine's work by tenant and adapter."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from loraserve.engine.request import QueueStats
from loraserve.engine.scheduling.sequence import Sequence, Status


@dataclass(slots=True)
class _Counts:
    num_running: int = 0
    num_waiting: int = 0
    num_tokens_waiting: int = 0


def queue_stats(sequences: Iterable[Sequence]) -> list[QueueStats]:
    """Running and waiting sequences by tenant and adapter, in the order of their first sequence."""
    counts: defaultdict[tuple[str, str | None], _Counts] = defaultdict(_Counts)
    for sequence in sequences:
        of = counts[sequence.request.tenant, sequence.request.adapter_digest]
        if sequence.status is Status.RUNNING:
            of.num_running += 1
        else:
            of.num_waiting += 1
        of.num_tokens_waiting += max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)
    return [
        QueueStats(tenant, digest, of.num_running, of.num_waiting, of.num_tokens_waiting)
        for (tenant, digest), of in counts.items()
    ]

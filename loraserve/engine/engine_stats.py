"""Statistics that the engine reports several times a second."""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.kv.blocks import BlockPool
from loraserve.engine.queue_stats import queue_stats
from loraserve.engine.request import EngineStats
from loraserve.engine.scheduling.scheduler import Scheduler
from loraserve.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class EngineCounts:
    """Since the engine started."""

    num_steps: int = 0
    num_generation_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafted tokens that were accepted."""
    recent_step_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=1024))
    """Rows of each step since the last snapshot."""


def engine_stats(
    counts: EngineCounts,
    pool: BlockPool,
    scheduler: Scheduler,
    waiting: Seq[Sequence],
    adapters: AdapterMemory | None,
    *,
    num_prompt_tokens: int,
    num_draft_tokens: int,
    list_residents: bool,
) -> EngineStats:
    """waiting: includes sequences that the scheduler does not know yet."""
    recent_step_tokens = list(counts.recent_step_tokens)
    counts.recent_step_tokens.clear()
    blocks = pool.counts()
    resident = adapters.resident if adapters is not None and list_residents else {}
    return EngineStats(
        step=counts.num_steps,
        num_running=len(scheduler.running),
        num_waiting=len(waiting),
        num_blocks=pool.num_blocks,
        num_free_blocks=blocks.free,
        num_cached_blocks=blocks.cached,
        prefix_cache_queries=scheduler.prefix_cache_queries,
        prefix_cache_hits=scheduler.prefix_cache_hits,
        num_preemptions=scheduler.num_preemptions,
        num_prompt_tokens=num_prompt_tokens,
        num_generation_tokens=counts.num_generation_tokens,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
        arena_size_bytes=0 if adapters is None else adapters.size_bytes,
        arena_used_bytes=0 if adapters is None else adapters.used_bytes,
        num_adapter_loads=0 if adapters is None else adapters.num_loads,
        num_adapter_evictions=0 if adapters is None else adapters.num_evictions,
        num_adapter_reloads=0 if adapters is None else adapters.num_reloads,
        running_adapters=_adapter_digests(scheduler.running),
        waiting_adapters=_adapter_digests(waiting),
        resident_adapters=list(resident),
        resident_extents=list(resident.values()),
        lists_residents=list_residents,
        queues=queue_stats([*scheduler.running, *waiting]),
        recent_step_tokens=recent_step_tokens,
    )


def _adapter_digests(sequences: Seq[Sequence]) -> list[str]:
    return sorted({s.request.adapter_digest for s in sequences if s.request.adapter_digest is not None})

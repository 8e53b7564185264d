"""/v1/live and /v1/engines: what is, right now.

A tenant sees its own adapters; what belongs to others is summed up without names.
"""

import msgspec


class ArenaExtent(msgspec.Struct, frozen=True):
    """A piece of an engine's adapter memory, in use."""

    offset_bytes: int
    size_bytes: int
    digest: str | None
    """Null where it belongs to somebody else."""
    tenant: str | None
    adapter: str | None
    version: int | None
    in_use: bool
    """A running sequence keeps it where it is; of a name that a tenant sees, one of its own."""


class KvBlocks(msgspec.Struct, frozen=True):
    num_blocks: int
    num_free: int
    """Never used or holding nothing."""
    num_cached: int
    """Holding a prefix that nobody uses now."""
    num_used: int
    block_size: int
    """Tokens."""


class QueueRow(msgspec.Struct, frozen=True):
    """Work of one tenant for one adapter."""

    tenant: str | None
    """Null: all that belongs to others."""
    adapter: str | None
    """Null: the base model, or (with a null tenant) whatever others use."""
    num_running: int
    num_queued: int
    num_tokens_waiting: int
    """Prompt tokens not yet computed."""


class EngineItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    state: str
    """ "ready", "starting", "stalled", "draining" or "dead"."""
    at: float
    """When it said so; Unix seconds."""
    started_at: float
    """Unix seconds."""
    model: str
    device: str
    dtype: str
    weights: str
    """The form of its layers' weights: the dtype, "int8", "int4" or "4 bits as stored", two where both are there."""
    backend: str
    max_model_len: int
    max_num_seqs: int
    num_running: int
    num_waiting: int
    kv: KvBlocks
    arena_size_bytes: int
    arena_used_bytes: int
    arena: list[ArenaExtent]
    """By offset."""
    num_adapter_loads: int
    """Since its start, into the arena."""
    num_adapter_evictions: int
    num_preemptions: int
    tokens_per_s: float
    """Prompt and output tokens computed, over the last 10 seconds."""
    queues: list[QueueRow]
    object: str = "engine"


class EngineList(msgspec.Struct, frozen=True):
    data: list[EngineItem]
    next_cursor: str | None = None
    object: str = "list"


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    """Unix seconds."""
    engines: list[EngineItem]
    redis: str
    """ "ready", "full" (nothing can be changed), "grace" (gone for less than --redis-grace-s) or "gone"."""
    object: str = "live"

"""/v1/live and /v1/engines: the present state.

A tenant sees the names of its own adapters; everything that belongs to others is summed up without names.
"""

import msgspec


class ArenaExtent(msgspec.Struct, frozen=True):
    """An occupied piece of an engine's adapter memory."""

    offset_bytes: int
    size_bytes: int
    digest: str | None
    """Hash of the content; null if it belongs to another tenant."""
    tenant: str | None
    """Null if unknown or another tenant's; likewise `adapter` and `version`."""
    adapter: str | None
    version: int | None
    in_use: bool
    """A running sequence uses it, so it is not evicted or moved. For an extent that a tenant sees by name, only that
    tenant's own sequences count."""


class KvBlocks(msgspec.Struct, frozen=True):
    """Memory for keys and values, in blocks."""

    num_blocks: int
    num_free: int
    """Blocks without content."""
    num_cached: int
    """Blocks with a cached prefix that no sequence uses now."""
    num_used: int
    """Blocks that sequences use now."""
    block_size: int
    """Tokens per block."""


class QueueRow(msgspec.Struct, frozen=True):
    """Work of one tenant for one adapter."""

    tenant: str | None
    """Null: the sum of everything that belongs to others."""
    adapter: str | None
    """Null: the base model or, if `tenant` is null too, whatever others use."""
    num_running: int
    """Running sequences."""
    num_queued: int
    """Waiting sequences."""
    num_tokens_waiting: int
    """Prompt tokens of these sequences that are not computed yet."""


class EngineItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    state: str
    """ "ready", "stalled" (has work, but made no progress for seconds), "draining" or "dead"."""
    at: float
    """When the engine reported this; Unix seconds."""
    started_at: float
    """Unix seconds."""
    model: str
    device: str
    dtype: str
    weights: str
    """Format of the layers' weights: the dtype, "int8", "int4", "4 bits as stored", or two of them joined by a
    comma."""
    backend: str
    max_model_len: int
    """Context length in tokens."""
    max_num_seqs: int
    """Most sequences that run at once."""
    num_running: int
    """Running sequences."""
    num_waiting: int
    """Waiting sequences."""
    kv: KvBlocks
    arena_size_bytes: int
    """Size of the adapter memory."""
    arena_used_bytes: int
    arena: list[ArenaExtent]
    """In order of offset."""
    num_adapter_loads: int
    """Adapters copied into the arena since the engine started."""
    num_adapter_evictions: int
    """Since the engine started."""
    num_preemptions: int
    """Since the engine started."""
    tokens_per_s: float
    """Prompt and output tokens computed per second, over the last 10 seconds."""
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
    """ "ready"; "full": it accepts no new data, so nothing can be changed; "grace": unreachable for less than
    --redis-grace-s; "gone": unreachable for longer."""
    object: str = "live"

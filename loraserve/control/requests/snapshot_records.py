"""What engines and processes report about themselves in Redis, once a second."""

from enum import StrEnum

import msgspec

from loraserve.engine.request import QueueStats


class EngineState(StrEnum):
    READY = "ready"
    STALLED = "stalled"
    """It has work but has made no progress for seconds."""
    DRAINING = "draining"
    """Its server takes no new requests."""
    DEAD = "dead"


class ResidentAdapter(msgspec.Struct, frozen=True, array_like=True):
    """A piece of an engine's adapter memory."""

    offset_bytes: int
    size_bytes: int
    digest: str
    in_use: bool


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Digests stand for adapters; names are added for each viewer, according to what it may see."""

    state: EngineState
    at: float
    """Unix time."""
    started_at: float
    model: str
    device: str
    dtype: str
    backend: str
    max_model_len: int
    max_num_seqs: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    block_size: int
    arena_size_bytes: int
    arena_used_bytes: int
    arena: list[ResidentAdapter]
    num_adapter_loads: int
    num_adapter_evictions: int
    num_preemptions: int
    tokens_per_s: float
    queues: list[QueueStats]
    weights: str = ""
    """See `ModelDescription`."""


class ProcessSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    url: str
    """Where a client on its machine reaches it; "" before it listens."""
    digests: list[str]
    """`short_digest` of contents that its engine knows, is unloading, or is about to get."""
    adapters: list[str] = []
    """Document ids of the adapters that its requests use."""
    tenants: list[str] = []
    """Tenants whose requests it runs."""


def short_digest(digest: str) -> str:
    """Enough to distinguish contents; a server may know thousands."""
    return digest[:16]


class RequestState(StrEnum):
    """As shown to people."""

    RUNNING = "running"
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    LOST = "lost"
    """Its server was killed."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request, running or over. Never a prompt or an answer."""

    id: str
    tenant: str
    key_id: str | None
    adapter: str | None
    """None = the base model."""
    adapter_tenant: str | None
    version: int | None
    route: str
    state: RequestState
    error: str | None = None
    stream: bool
    at: float
    """When it arrived; Unix time."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    queue_ms: float | None = None
    adapter_load_ms: float | None = None
    ttft_ms: float | None = None
    duration_ms: float | None = None


class RunningSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    requests: list[RequestRecord]

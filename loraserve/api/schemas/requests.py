"""/v1/requests: what was asked of the server lately. Never a prompt or an answer."""

import msgspec


class RequestItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """As in x-request-id."""
    tenant: str
    key_id: str | None
    """Null on an open server."""
    adapter: str | None
    """Null: the base model."""
    version: int | None
    route: str
    """ "chat.completions", "classify", "completions", "embeddings", "generate", "messages", "rerank", "responses" or
    "score"."""
    state: str
    """ "running", or how it ended: "stop", "length", "abort", "error" or "lost" (its server was killed)."""
    error: str | None
    """Code, of one that ended with "error"."""
    stream: bool
    at: float
    """When it came in; Unix seconds."""
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int | None
    queue_ms: float | None
    adapter_load_ms: float | None
    ttft_ms: float | None
    duration_ms: float | None
    object: str = "request"


class RequestList(msgspec.Struct, frozen=True):
    """Newest first."""

    data: list[RequestItem]
    next_cursor: str | None
    object: str = "list"

"""/v1/requests: recent inference requests, without their prompts and answers."""

import msgspec


class RequestItem(msgspec.Struct, frozen=True, kw_only=True):
    """One inference request, running or ended."""

    id: str
    """As in the header x-request-id."""
    tenant: str
    key_id: str | None
    """Null on a server that requires no key."""
    adapter: str | None
    """Null for the base model."""
    version: int | None
    """Null for the base model."""
    route: str
    """ "chat.completions", "classify", "completions", "embeddings", "generate", "messages", "rerank", "responses" or
    "score"."""
    state: str
    """ "running", or how it ended: "stop", "length", "abort", "error" or "lost" (its server was killed)."""
    error: str | None
    """Error code, if the state is "error"."""
    stream: bool
    """Whether the answer is streamed."""
    at: float
    """When it arrived; Unix seconds."""
    num_prompt_tokens: int | None
    """Null while unknown, like the fields below."""
    num_cached_tokens: int | None
    """Prompt tokens found in the prefix cache."""
    num_output_tokens: int | None
    queue_ms: float | None
    """Time in the engine until it was first scheduled."""
    adapter_load_ms: float | None
    """Time to load the adapter; null for the base model."""
    ttft_ms: float | None
    """From its arrival to its first token."""
    duration_ms: float | None
    """From its arrival to its end, or until now if it is running."""
    object: str = "request"


class RequestList(msgspec.Struct, frozen=True):
    """Running requests first, newest first; then ended ones, latest end first."""

    data: list[RequestItem]
    next_cursor: str | None
    """Send it as `cursor` to get the next page; null on the last page."""
    object: str = "list"

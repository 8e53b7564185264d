"""Where a request's time went, for whoever asks with `include_metrics`."""

import msgspec


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds; null where nothing was generated."""

    queue_time_ms: float | None
    """In the engine, until first scheduled."""
    adapter_load_ms: float | None
    """What loading the adapter took before that; null for the base model."""
    time_to_first_token_ms: float | None
    """From the request's arrival."""
    generation_time_ms: float | None
    """From the first to the last token."""
    mean_itl_ms: float | None
    """Between two tokens of one choice."""
    tokens_per_second: float | None
    """Output tokens after each choice's first, over generation_time_ms."""
    cached_tokens: int
    """Prompt tokens that were in the prefix cache."""
    adapter_version: int | None

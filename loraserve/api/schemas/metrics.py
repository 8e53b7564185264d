"""How a request's time was spent, returned with `include_metrics`."""

import msgspec


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in milliseconds, and null if nothing was generated."""

    queue_time_ms: float | None
    """Time in the engine until the request was first scheduled."""
    adapter_load_ms: float | None
    """Time to load the adapter before that; null for the base model."""
    time_to_first_token_ms: float | None
    """From the arrival of the request to its first token."""
    generation_time_ms: float | None
    """From the first token to the last."""
    mean_itl_ms: float | None
    """Mean time between two tokens of one choice; null if no choice has two."""
    tokens_per_second: float | None
    """Output tokens, not counting the first of each choice, divided by `generation_time_ms`."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    adapter_version: int | None
    """Null for the base model."""

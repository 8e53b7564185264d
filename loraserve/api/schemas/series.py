"""/v1/series: a few minutes to a day of the server, in equal steps."""

import msgspec


class SeriesView(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of one length; null where nothing was measured. Percentiles come from merged histograms."""

    step_s: int
    """10 for windows up to an hour, 60 beyond."""
    at: list[float]
    """The end of each step; Unix seconds."""
    output_tokens_per_s: list[float | None]
    prompt_tokens_per_s: list[float | None]
    requests_per_s: list[float | None]
    errors_per_s: list[float | None]
    """Answers of 5xx and streams that ended in an error."""
    num_running: list[float | None]
    num_waiting: list[float | None]
    kv_used: list[float | None]
    """Share of KV blocks in use, 0 to 1."""
    arena_used: list[float | None]
    """Share of the adapter memory in use, 0 to 1."""
    num_adapter_loads: list[float | None]
    """Into the adapter memory, during the step."""
    num_adapter_evictions: list[float | None]
    cache_hit: list[float | None]
    """Share of prompt tokens found in the prefix cache, 0 to 1."""
    ttft_p50_ms: list[float | None]
    ttft_p95_ms: list[float | None]
    itl_p50_ms: list[float | None]
    itl_p95_ms: list[float | None]
    object: str = "series"

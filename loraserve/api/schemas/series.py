"""/v1/series: measurements of the last 15 minutes to 24 hours, in equal steps."""

import msgspec


class SeriesView(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of equal length; null where nothing was measured. Percentiles are computed from merged histograms."""

    step_s: int
    """Length of a step in seconds: 10 for the windows "15m" and "1h", 60 for "24h"."""
    at: list[float]
    """End of each step; Unix seconds."""
    output_tokens_per_s: list[float | None]
    prompt_tokens_per_s: list[float | None]
    requests_per_s: list[float | None]
    errors_per_s: list[float | None]
    """Responses with a 5xx status, and streams that ended with an error."""
    num_running: list[float | None]
    """Running sequences."""
    num_waiting: list[float | None]
    """Waiting sequences."""
    kv_used: list[float | None]
    """Share of KV blocks in use, 0 to 1."""
    arena_used: list[float | None]
    """Share of adapter memory in use, 0 to 1."""
    num_adapter_loads: list[float | None]
    """Loads into adapter memory during the step."""
    num_adapter_evictions: list[float | None]
    """Evictions from adapter memory during the step."""
    cache_hit: list[float | None]
    """Share of prompt tokens found in the prefix cache, 0 to 1."""
    ttft_p50_ms: list[float | None]
    """Median time to first token."""
    ttft_p95_ms: list[float | None]
    itl_p50_ms: list[float | None]
    """Median time between two tokens."""
    itl_p95_ms: list[float | None]
    object: str = "series"

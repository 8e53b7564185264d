"""/v1/usage: tokens and requests served, summed from the usage logs."""

import msgspec


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over one period and one group."""

    start: float
    """Start of the hour or day in UTC, or of the whole period; Unix seconds."""
    tenant: str | None = None
    """Null if rows are not grouped by it; likewise `key_id`, `adapter` and `version`."""
    key_id: str | None = None
    adapter: str | None = None
    """ "" = the base model."""
    version: int | None = None
    num_requests: int
    num_errors: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_output_tokens: int
    ttft_p50_ms: float | None
    """Median time to first token."""
    ttft_p95_ms: float | None


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    interval: str
    """ "hour", "day" or "total"."""
    data: list[UsageRow]
    complete: bool
    """False while older logs are still being added again after Redis lost its counters."""
    next_cursor: str | None = None
    object: str = "list"

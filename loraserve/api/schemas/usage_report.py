"""/v1/usage: what was delivered, added up from the usage log."""

import msgspec


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    start: float
    """Of the hour or day, in UTC; Unix seconds."""
    tenant: str | None = None
    """Null where rows are not grouped by it."""
    key_id: str | None = None
    adapter: str | None = None
    """ "" = the base model."""
    version: int | None = None
    num_requests: int
    num_errors: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    interval: str
    """ "hour", "day" or "total"."""
    data: list[UsageRow]
    complete: bool
    """False while older logs are still being added after Redis lost its counters."""
    next_cursor: str | None = None
    object: str = "list"

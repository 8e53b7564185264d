"""Requests that ended since the totals were last taken, by tenant, for charts."""

from collections import Counter
from dataclasses import dataclass, field

from loraserve.control.usage.outcome import Outcome
from loraserve.live.requests import EndState
from loraserve.serving.errors import SERVER_FAULTS
from loraserve.serving.telemetry.latency_histogram import bucket_of

AdapterKey = tuple[str, str]
"""(owner, name)."""


@dataclass(slots=True)
class TenantTotals:
    num_requests: int = 0
    num_errors: int = 0
    """Those of them that failed through the server's fault."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    """Requests by bucket."""


class RequestTotals:
    """Called on the event loop."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, TenantTotals] = {}
        self._last_used_at: dict[tuple[str, AdapterKey], float] = {}

    def last_used_at(self, tenant: str) -> dict[AdapterKey, float]:
        """Unix time of the last request of a tenant to each adapter, on this server since its start."""
        return {key: at for (of_tenant, key), at in self._last_used_at.items() if of_tenant == tenant}

    def count(self, tenant: str, adapter: AdapterKey | None, outcome: Outcome, now: float) -> None:
        """adapter: None = the base model."""
        if adapter is not None:
            self._last_used_at[tenant, adapter] = now
        totals = self._by_tenant.setdefault(tenant, TenantTotals())
        totals.num_requests += 1
        totals.num_errors += outcome.ending is EndState.FAILED and outcome.error_code in SERVER_FAULTS
        totals.num_prompt_tokens += outcome.num_prompt_tokens
        totals.num_cached_tokens += outcome.num_cached_tokens
        totals.num_output_tokens += outcome.num_output_tokens
        if outcome.ttft_ms is not None:
            totals.ttft[bucket_of(outcome.ttft_ms)] += 1

    def take(self) -> dict[str, TenantTotals]:
        """Return the totals and start again from zero."""
        taken, self._by_tenant = self._by_tenant, {}
        return taken

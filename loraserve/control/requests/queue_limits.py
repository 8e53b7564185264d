"""Limits on sequences that wait for the engine: in all, of a tenant, of a key."""

from loraserve.control.documents.catalog import Catalog
from loraserve.control.requests.running import RunningRequests
from loraserve.control.tenancy.principal import Principal
from loraserve.serving.engine_client import EngineClient
from loraserve.serving.errors import ErrorCode, ServingError

QUEUE_RETRY_AFTER_S = 1
MAX_QUEUED_PER_TENANT = 32


class QueueLimits:
    """Called on the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        running: RunningRequests,
        engine: EngineClient,
        *,
        max_queued: int,
        max_queued_per_tenant: int | None,
    ) -> None:
        """Both in sequences. max_queued_per_tenant: for tenants without a `max_queued` of their own; None = 32, or
        `max_queued` while no key is required, so that the only user of a server can fill its queue."""
        self._catalog = catalog
        self._running = running
        self._engine = engine
        self._max_queued = max_queued
        self._max_queued_per_tenant = max_queued_per_tenant

    def check(self, principal: Principal, num_sequences: int) -> None:
        """Raises `ServingError` (429) if too much is waiting already."""
        num_running, max_num_seqs = self._running.num_sequences(), self._engine.model.max_num_seqs
        # The engine's own count lags by a step; ours includes what arrived since.
        num_waiting = max(self._engine.stats.num_waiting, num_running - max_num_seqs)
        _check_queue("The server", num_waiting, self._max_queued)
        for whose, num_queued, cap in self._caps(principal):
            if cap == 0 and num_running + num_sequences <= max_num_seqs:
                continue
            _check_queue(whose, min(num_queued, num_waiting), cap)

    def _caps(self, principal: Principal) -> list[tuple[str, int, int]]:
        """(whose, sequences without a token, maximum)."""
        key = self._catalog.key(principal.key_id) if principal.key_id is not None else None
        num_queued = self._running.num_queued(tenant=principal.acting_tenant)
        caps = [("Your tenant", num_queued, self._tenant_cap(principal))]
        if key is not None and key.doc.limits.max_queued is not None:
            caps.append(("Your API key", self._running.num_queued(key_id=principal.key_id), key.doc.limits.max_queued))
        return caps

    def _tenant_cap(self, principal: Principal) -> int:
        tenant = self._catalog.tenant(principal.acting_tenant)
        if tenant is not None and tenant.doc.limits.max_queued is not None:
            return tenant.doc.limits.max_queued
        if self._max_queued_per_tenant is not None:
            return self._max_queued_per_tenant
        return self._max_queued if principal.is_open else MAX_QUEUED_PER_TENANT


def _check_queue(whose: str, num_waiting: int, cap: int) -> None:
    if num_waiting >= cap:
        message = f"{whose} has {max(0, num_waiting)} sequences waiting; the limit is {cap}. Retry later."
        raise ServingError(ErrorCode.QUEUE_FULL, message, retry_after_s=QUEUE_RETRY_AFTER_S)

"""Admission without Redis: within limits that this process counts alone."""

from loraserve.control.documents.outage import Outage
from loraserve.control.names.resolve import Target
from loraserve.control.requests.admitted import Admitted, documents_of
from loraserve.control.requests.local_limits import LocalLimits
from loraserve.control.requests.rate_headers import limit_error
from loraserve.control.requests.running import RunningRequests
from loraserve.control.tenancy.authenticator import Authenticator
from loraserve.control.tenancy.principal import Principal
from loraserve.control.unavailable import live_unavailable
from loraserve.live.admission_records import AdmitCall
from loraserve.store.records import DocumentKind, DocumentRef, Limits


class LocalAdmission:
    """Called on the event loop."""

    def __init__(
        self, outage: Outage, authenticator: Authenticator, running: RunningRequests, limits: LocalLimits
    ) -> None:
        self._outage = outage
        self._authenticator = authenticator
        self._running = running
        self._limits = limits

    def admit(self, principal: Principal, target: Target, call: AdmitCall) -> Principal:
        """Takes what the call requests; returns the principal as it is now. Raises `ServingError`."""
        if not self._outage.allows(documents_of(principal, target)):
            raise live_unavailable()
        # By the newest documents: changes on disk during the outage count too.
        principal = self._authenticator.newest(principal)
        tenant = (DocumentKind.TENANT, principal.acting_tenant)
        scopes: list[tuple[DocumentRef, Limits, int]] = [
            (tenant, call.tenant_limits, self._running.num_of_tenant(principal.acting_tenant))
        ]
        if principal.key_id is not None:
            key = (DocumentKind.KEY, principal.key_id)
            scopes.append((key, call.key_limits, self._running.num_of_key(principal.key_id)))
        limited = self._limits.try_take(scopes, call.reserve_tokens)
        if limited is not None:
            raise limit_error(limited)
        return principal

    def give_back(self, admitted: Admitted, num_tokens: int) -> None:
        """num_tokens: taken but not used; negative if more was used."""
        self._limits.give_back([*admitted.limits], num_tokens)

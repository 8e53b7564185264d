"""A request that may run, and the documents it depends on."""

from collections.abc import Mapping
from dataclasses import dataclass

from loraserve.control.names.resolve import Target
from loraserve.control.requests.running import RunningRequest
from loraserve.control.tenancy.principal import Principal
from loraserve.live.leases import Lease
from loraserve.store.records import DocumentKind, DocumentRef, Limits


@dataclass(slots=True, eq=False)
class Admitted:
    """`Admission.finish` must be called for it; further calls change nothing."""

    request_id: str
    principal: Principal
    """As of the revisions with which it was admitted."""
    target: Target
    """Likewise: an alias may have moved since the name was first resolved."""
    running: RunningRequest
    kv_salt: str
    """Of the acting tenant; part of every prefix-cache hash."""
    reserved_tokens: int
    headers: Mapping[str, str]
    """x-ratelimit-*, for the response."""
    lease: Lease
    limits: dict[DocumentRef, Limits]
    """Of the tenant and the key when it was admitted."""
    is_local: bool
    """Admitted while Redis was gone."""
    finished: bool = False

    def limits_of(self, kind: DocumentKind) -> Limits:
        return next((limits for ref, limits in self.limits.items() if ref[0] is kind), Limits())


def documents_of(principal: Principal, target: Target) -> list[DocumentRef]:
    """Tenant, key and adapter: any change to them may end the request."""
    refs: list[DocumentRef] = [(DocumentKind.TENANT, principal.acting_tenant)]
    if principal.key_id is not None:
        refs.append((DocumentKind.KEY, principal.key_id))
    if target.adapter is not None:
        refs.append((DocumentKind.ADAPTER, target.adapter.document_id))
    return refs

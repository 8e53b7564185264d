"""Calls and replies of admission."""

from enum import StrEnum

import msgspec

from loraserve.live.leases import Lease
from loraserve.live.requests import EndedRequest
from loraserve.store.records import Limits


class Scope(StrEnum):
    TENANT = "tenant"
    KEY = "key"
    ADAPTER = "adapter"
    """Only in `Stale`; adapters have no limits."""


class Measure(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """A revision on which the decision to serve was based."""

    id: str
    rev: int


class AdmitCall(msgspec.Struct, frozen=True, kw_only=True):
    lease: Lease
    tenant_rev: int
    tenant_limits: Limits = Limits()
    key_rev: int | None = None
    """Set if and only if `lease.key_id` is."""
    key_limits: Limits = Limits()
    adapter: Used | None = None
    """None: the base model."""
    reserve_tokens: int
    """If larger than the whole bucket, it is admitted when the bucket is full, and leaves a debt."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    limit: int
    """Per minute."""
    remaining: int
    reset_ms: int
    """Until the bucket is full again, if nothing else takes from it."""


class LiveAdmitted(msgspec.Struct, frozen=True, kw_only=True):
    requests: Budget | None
    """The tighter budget of key and tenant; None = neither has a limit."""
    tokens: Budget | None


class Limited(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was taken."""

    scope: Scope
    measure: Measure
    limit: int
    retry_ms: int | None
    """None: never, because the limit is 0."""


class Stale(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was taken; for each of these, Redis has another revision, or none."""

    scopes: list[Scope]


class ViewChanged(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was taken: Redis was emptied, rebuilt or restarted since this process compared its documents with it."""


class AlreadyEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was taken: `finish` came first."""

    request: EndedRequest


AdmitReply = LiveAdmitted | Limited | Stale | ViewChanged | AlreadyEnded


class FinishCall(msgspec.Struct, frozen=True, kw_only=True):
    lease: Lease
    request: EndedRequest
    unused_tokens: int = 0
    """Reserved minus used; negative if more was used than reserved."""
    was_admitted: bool = True
    """False: `admit` was not answered, so settle only if the lease exists, which means that `admit` took effect or the
    lease was renewed since."""
    tenant_limits: Limits = Limits()
    key_limits: Limits = Limits()


class FinishReply(msgspec.Struct, frozen=True, kw_only=True):
    was_first: bool
    request: EndedRequest
    """The end state that counts: the first one reported."""

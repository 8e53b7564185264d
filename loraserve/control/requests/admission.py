"""Every inference request passes here twice: in, against limits and revocations; at its end, into the usage log."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from loraserve.control.background import Tasks
from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.outage import Outage
from loraserve.control.names.resolve import Resolver, Target
from loraserve.control.requests.admitted import Admitted, documents_of
from loraserve.control.requests.endings import ended, ended_unconfirmed, usage_line, used_tokens
from loraserve.control.requests.local_admission import LocalAdmission
from loraserve.control.requests.queue_limits import QueueLimits
from loraserve.control.requests.rate_headers import budget_headers, limit_error
from loraserve.control.requests.running import Demand, RunningRequest, RunningRequests
from loraserve.control.requests.settlements import Settlements
from loraserve.control.tenancy.authenticator import Authenticator, check_not_suspended
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.control.usage.outcome import Outcome
from loraserve.control.usage.request_totals import RequestTotals
from loraserve.control.usage.writer import UsageWriter
from loraserve.live.admission_records import (
    AdmitCall,
    AlreadyEnded,
    Limited,
    LiveAdmitted,
    Scope,
    Stale,
    Used,
    ViewChanged,
)
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.leases import Lease
from loraserve.live.live_store import LiveStore
from loraserve.live.requests import EndedRequest
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import DocumentKind, Limits

MAX_RESERVED_OUTPUT = 256
STALE_TRIES = 3

logger = logging.getLogger(__name__)


def reserve_tokens(num_prompt_bytes: int, max_tokens: int, num_choices: int = 1) -> int:
    """Tokens reserved from the budget before the request is tokenized; settled exactly when it ends."""
    return num_prompt_bytes // 4 + num_choices * min(max_tokens, MAX_RESERVED_OUTPUT)


class Admission:
    """Called on the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        live: LiveStore,
        authenticator: Authenticator,
        resolver: Resolver,
        running: RunningRequests,
        usage: UsageWriter,
        outage: Outage,
        queues: QueueLimits,
        local: LocalAdmission,
        *,
        process: str,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """process: the id of this process, unique to each start."""
        self._catalog = catalog
        self._live = live
        self._authenticator = authenticator
        self._resolver = resolver
        self._running = running
        self._usage = usage
        self._outage = outage
        self._queues = queues
        self._local = local
        self._process = process
        self._clock = clock
        self._steady = steady
        self.totals = RequestTotals()
        self._settlements = Settlements(live.admission)
        self._ending: dict[str, EndedRequest] = {}
        """By request id: those whose end is being reported to Redis."""
        self._undoing = Tasks()

    async def admit(
        self, principal: Principal, target: Target, request_id: str, demand: Demand, received_s: float
    ) -> Admitted:
        """Raises `ServingError`: 401, 403 or 404 if a newer revision says so, 429 with Retry-After, 503.

        request_id: chosen by this server, unique. received_s: when the request arrived, by `steady`. If cancelled, the
        admission is undone in the background.
        """
        for _ in range(STALE_TRIES):
            principal.require(Action.INFER)
            check_not_suspended(self._catalog, principal.acting_tenant)
            self._queues.check(principal, demand.num_sequences)
            call = self._call(principal, target, request_id, demand.reserve_tokens)
            try:
                with self._running.entering(principal, demand.num_sequences, target.adapter):
                    reply = await self._ask(call)
            except asyncio.CancelledError:
                self._undo(call)
                raise
            except LiveUnavailableError as error:
                self._outage.failed(error)
                return self._admit_locally(principal, target, call, demand, received_s)
            match reply:
                case LiveAdmitted():
                    self._outage.succeeded()
                    self._outage.confirm(documents_of(principal, target))
                    headers = budget_headers(reply.requests, reply.tokens)
                    return self._begin(principal, target, call, demand, received_s, headers, is_local=False)
                case Limited():
                    raise limit_error(reply)
                case AlreadyEnded():
                    message = f"The request {request_id} was ended before it began."
                    raise ServingError(ErrorCode.CLIENT_CLOSED_REQUEST, message)
                case Stale():
                    await self._refresh(principal, target, reply)
                    principal = self._authenticator.newest(principal)
                    target = await self._resolver.resolve_again(principal, target)
        message = "The adapter, key or tenant keeps changing. Retry shortly."
        raise ServingError(ErrorCode.SERVICE_UNAVAILABLE, message, retry_after_s=1)

    async def finish(self, admitted: Admitted, outcome: Outcome) -> None:
        """Write one usage line, return leases and unused tokens, set the terminal state.

        The line is written before anything is awaited; on a full disk, when there is room again. If Redis is gone, the
        rest is left to `settle_again`.
        """
        if admitted.finished:
            return
        admitted.finished = True
        self._running.remove(admitted.request_id)
        now, duration_ms = self._clock(), admitted.running.duration_ms(self._steady())
        self._usage.write(usage_line(admitted, outcome, now, duration_ms))
        adapter = admitted.target.adapter
        key = None if adapter is None else (adapter.tenant, adapter.name)
        self.totals.count(admitted.lease.tenant, key, outcome, now)
        call = ended(admitted, outcome, now, duration_ms, admitted.reserved_tokens)
        self._ending[admitted.request_id] = call.request
        try:
            if admitted.is_local:
                self._local.give_back(admitted, admitted.reserved_tokens - used_tokens(outcome))
                # Redis may have admitted it too and taken tokens from its buckets, though its answer did not arrive.
                if not await self._live.leases.drop(admitted.request_id):
                    call = ended(admitted, outcome, now, duration_ms, 0)
            await self._settlements.settle(call)
        finally:
            del self._ending[admitted.request_id]

    def unsettled(self) -> list[EndedRequest]:
        """Requests that have ended here, though Redis may not know it yet."""
        return [*self._ending.values(), *self._settlements.unsettled()]

    async def settle_again(self) -> None:
        """Settle what ended while Redis was gone. Call periodically."""
        await self._settlements.retry()

    async def close(self) -> None:
        """Afterwards nothing is left to undo or settle, if Redis is reachable."""
        await self._undoing.wait()
        await self._settlements.retry()

    async def _ask(self, call: AdmitCall) -> LiveAdmitted | Limited | Stale | AlreadyEnded:
        """Raises `LiveUnavailableError`, also if Redis keeps being replaced."""
        for _ in range(STALE_TRIES):
            await self._catalog.synchronise()
            reply = await self._live.admission.admit(call)
            if not isinstance(reply, ViewChanged):
                return reply
        raise LiveUnavailableError("Redis keeps being emptied or restarted")

    def _call(self, principal: Principal, target: Target, request_id: str, reserve: int) -> AdmitCall:
        tenant = self._catalog.tenant(principal.acting_tenant)
        assert tenant is not None
        key = self._catalog.key(principal.key_id) if principal.key_id is not None else None
        return AdmitCall(
            lease=Lease(
                request_id=request_id,
                process=self._process,
                tenant=principal.acting_tenant,
                key_id=principal.key_id,
            ),
            tenant_rev=tenant.rev,
            tenant_limits=tenant.doc.limits,
            # The revision that the principal was made from: if the key changed since then, Redis reports it.
            key_rev=principal.key_rev if principal.key_id is not None else None,
            key_limits=key.doc.limits if key is not None else Limits(),
            adapter=(
                None if target.adapter is None else Used(id=target.adapter.document_id, rev=target.adapter.adapter_rev)
            ),
            reserve_tokens=reserve,
        )

    async def _refresh(self, principal: Principal, target: Target, stale: Stale) -> None:
        for scope in stale.scopes:
            match scope:
                case Scope.TENANT:
                    await self._catalog.try_refresh(DocumentKind.TENANT, principal.acting_tenant)
                case Scope.KEY if principal.key_id is not None:
                    await self._catalog.try_refresh(DocumentKind.KEY, principal.key_id)
                case Scope.ADAPTER if target.adapter is not None:
                    await self._catalog.try_refresh(DocumentKind.ADAPTER, target.adapter.document_id)
                case _:
                    raise AssertionError(f"stale {scope}, which the request does not depend on")

    def _begin(
        self,
        principal: Principal,
        target: Target,
        call: AdmitCall,
        demand: Demand,
        received_s: float,
        headers: Mapping[str, str],
        *,
        is_local: bool,
    ) -> Admitted:
        request_id = call.lease.request_id
        # If the tenant was deleted since the call, `Revocation` ends the request, like any other.
        tenant = self._catalog.known_tenant(principal.acting_tenant)
        assert tenant is not None
        received_at = self._clock() - (self._steady() - received_s)
        running = RunningRequest(
            request_id, principal, target, received_at, received_s, demand.num_sequences, demand.route_info
        )
        self._running.add(running)
        limits = {(DocumentKind.TENANT, principal.acting_tenant): call.tenant_limits}
        if principal.key_id is not None:
            limits[DocumentKind.KEY, principal.key_id] = call.key_limits
        return Admitted(
            request_id=request_id,
            principal=principal,
            target=target,
            running=running,
            kv_salt=tenant.doc.kv_salt,
            reserved_tokens=call.reserve_tokens,
            headers=headers,
            lease=call.lease,
            limits=limits,
            is_local=is_local,
        )

    def _admit_locally(
        self, principal: Principal, target: Target, call: AdmitCall, demand: Demand, received_s: float
    ) -> Admitted:
        """For when Redis is gone. Raises `ServingError`."""
        try:
            principal = self._local.admit(principal, target, call)
        except ServingError:
            self._undo(call)
            raise
        # All servers count it again as soon as Redis is back.
        self._live.leases.hold(call.lease, is_confirmed=False)
        return self._begin(principal, target, call, demand, received_s, {}, is_local=True)

    def _undo(self, call: AdmitCall) -> None:
        """The request did not begin; it is unknown whether Redis admitted it."""
        self._undoing.start(self._settlements.settle(ended_unconfirmed(call, self._clock())))

"""What remains of an ended request: a line in the usage log, and what Redis keeps to show and to settle."""

import msgspec

from loraserve.control.requests.admitted import Admitted
from loraserve.control.usage.outcome import Outcome, RequestSummary, billed_outcome
from loraserve.live.admission_records import AdmitCall, FinishCall
from loraserve.live.requests import EndedRequest, EndState
from loraserve.store.records import DocumentKind
from loraserve.store.usage_log import UsageLine


def usage_line(admitted: Admitted, outcome: Outcome, now: float, duration_ms: float) -> UsageLine:
    adapter = admitted.target.adapter
    return UsageLine(
        request_id=admitted.request_id,
        at=now,
        tenant=admitted.lease.tenant,
        key_id=None if admitted.principal.is_open else admitted.principal.actor,
        adapter=None if adapter is None else adapter.name,
        adapter_tenant=None if adapter is None else adapter.tenant,
        version=None if adapter is None else adapter.version,
        digest=None if adapter is None else adapter.digest,
        prompt_tokens=outcome.num_prompt_tokens,
        cached_tokens=outcome.num_cached_tokens,
        output_tokens=outcome.num_output_tokens,
        outcome=billed_outcome(outcome),
        ttft_ms=outcome.ttft_ms,
        duration_ms=duration_ms,
    )


def used_tokens(outcome: Outcome) -> int:
    """As token limits count them."""
    return outcome.num_prompt_tokens + outcome.num_output_tokens


def ended(admitted: Admitted, outcome: Outcome, now: float, duration_ms: float, reserved_tokens: int) -> FinishCall:
    """reserved_tokens: taken from the buckets in Redis, if the lease is there; 0 = used tokens are yet to be taken."""
    return FinishCall(
        lease=admitted.lease,
        request=EndedRequest(
            request_id=admitted.request_id,
            tenant=admitted.lease.tenant,
            state=outcome.ending,
            at=now,
            summary=msgspec.Raw(msgspec.json.encode(_summary(admitted, outcome, duration_ms))),
        ),
        unused_tokens=reserved_tokens - used_tokens(outcome),
        was_admitted=not admitted.is_local,
        tenant_limits=admitted.limits_of(DocumentKind.TENANT),
        key_limits=admitted.limits_of(DocumentKind.KEY),
    )


def ended_unconfirmed(call: AdmitCall, now: float) -> FinishCall:
    """For a request of which it is unknown whether Redis admitted it."""
    return FinishCall(
        lease=call.lease,
        request=EndedRequest(
            request_id=call.lease.request_id, tenant=call.lease.tenant, state=EndState.ABORTED, at=now
        ),
        unused_tokens=call.reserve_tokens,
        was_admitted=False,
        tenant_limits=call.tenant_limits,
        key_limits=call.key_limits,
    )


def _summary(admitted: Admitted, outcome: Outcome, duration_ms: float) -> RequestSummary:
    adapter = admitted.target.adapter
    return RequestSummary(
        key_id=None if admitted.principal.is_open else admitted.principal.actor,
        adapter=None if adapter is None else adapter.name,
        adapter_tenant=None if adapter is None else adapter.tenant,
        version=None if adapter is None else adapter.version,
        route=admitted.running.route_info.route,
        stream=admitted.running.route_info.stream,
        received_at=admitted.running.received_at,
        duration_ms=duration_ms,
        finish_reason=outcome.finish_reason,
        prompt_tokens=outcome.num_prompt_tokens,
        cached_tokens=outcome.num_cached_tokens,
        output_tokens=outcome.num_output_tokens,
        queue_ms=outcome.queue_ms,
        adapter_load_ms=outcome.adapter_load_ms,
        ttft_ms=outcome.ttft_ms,
        error_code=outcome.error_code,
    )

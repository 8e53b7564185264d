"""Requests as shown to people, from what runs and from what Redis keeps of ended requests."""

import msgspec

from loraserve.control.requests.running import RunningRequest
from loraserve.control.requests.snapshot_records import RequestRecord, RequestState
from loraserve.control.usage.outcome import RequestSummary
from loraserve.live.leases import Lease
from loraserve.live.requests import EndedRequest, EndState

STATE_OF = {
    EndState.ABORTED: RequestState.ABORT,
    EndState.FAILED: RequestState.ERROR,
    EndState.LOST: RequestState.LOST,
}
END_OF = {state: end for end, state in STATE_OF.items()} | {RequestState.RUNNING: EndState.LOST}


def record_of_running(running: RunningRequest, now_s: float) -> RequestRecord:
    """now_s: on the clock of `RunningRequest.received_s`."""
    adapter, progress = running.target.adapter, running.progress()
    return RequestRecord(
        id=running.request_id,
        tenant=running.tenant,
        key_id=None if running.principal.is_open else running.principal.actor,
        adapter=None if adapter is None else adapter.name,
        adapter_tenant=None if adapter is None else adapter.tenant,
        version=None if adapter is None else adapter.version,
        route=running.route_info.route,
        state=RequestState.RUNNING,
        stream=running.route_info.stream,
        at=running.received_at,
        num_prompt_tokens=progress.num_prompt_tokens,
        num_cached_tokens=progress.num_cached_tokens,
        num_output_tokens=progress.num_output_tokens,
        queue_ms=progress.queue_ms,
        adapter_load_ms=progress.adapter_load_ms,
        ttft_ms=progress.ttft_ms,
        duration_ms=running.duration_ms(now_s),
    )


def record_of_ended(ended: EndedRequest) -> RequestRecord | None:
    """None for a request that never began."""
    try:
        summary = msgspec.json.decode(ended.summary, type=RequestSummary)
    except msgspec.ValidationError:
        return None
    return RequestRecord(
        id=ended.request_id,
        tenant=ended.tenant,
        key_id=summary.key_id,
        adapter=summary.adapter,
        adapter_tenant=summary.adapter_tenant,
        version=summary.version,
        route=summary.route,
        state=STATE_OF.get(ended.state) or _finished(summary.finish_reason),
        error=summary.error_code,
        stream=summary.stream,
        at=summary.received_at,
        num_prompt_tokens=summary.prompt_tokens,
        num_cached_tokens=summary.cached_tokens,
        num_output_tokens=summary.output_tokens,
        queue_ms=summary.queue_ms,
        adapter_load_ms=summary.adapter_load_ms,
        ttft_ms=summary.ttft_ms,
        duration_ms=summary.duration_ms,
    )


def left_behind(lease: Lease, last: RequestRecord | None, now: float) -> EndedRequest:
    """Of a process that was killed: lost, unless it had ended and only Redis did not know it yet.

    last: what its process last reported of it; None = no longer known.
    """
    last = last or _unreported(lease, now)
    state = END_OF.get(last.state, EndState.COMPLETED)
    summary = RequestSummary(
        key_id=last.key_id,
        adapter=last.adapter,
        adapter_tenant=last.adapter_tenant,
        version=last.version,
        route=last.route,
        stream=last.stream,
        received_at=last.at,
        duration_ms=last.duration_ms or 0.0,
        finish_reason=RequestState.LOST if state is EndState.LOST else last.state,
        prompt_tokens=last.num_prompt_tokens or 0,
        cached_tokens=last.num_cached_tokens or 0,
        output_tokens=last.num_output_tokens or 0,
        queue_ms=last.queue_ms,
        adapter_load_ms=last.adapter_load_ms,
        ttft_ms=last.ttft_ms,
        error_code=last.error,
    )
    return EndedRequest(
        request_id=lease.request_id,
        tenant=lease.tenant,
        state=state,
        at=now,
        summary=msgspec.Raw(msgspec.json.encode(summary)),
    )


def _unreported(lease: Lease, now: float) -> RequestRecord:
    return RequestRecord(
        id=lease.request_id,
        tenant=lease.tenant,
        key_id=lease.key_id,
        adapter=None,
        adapter_tenant=None,
        version=None,
        route="",
        state=RequestState.RUNNING,
        stream=False,
        at=now,
    )


def _finished(finish_reason: str) -> RequestState:
    return RequestState.LENGTH if finish_reason == RequestState.LENGTH else RequestState.STOP

"""An admitted request, from admission to its single end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from litestar import Request

from loraserve.api.http.auth import principal_of
from loraserve.api.http.processing_time import received_s
from loraserve.api.http.request_id import own_request_id
from loraserve.api.inference.activation import check_activated
from loraserve.api.inference.classifiers import check_has_text
from loraserve.api.inference.common_fields import CommonFields
from loraserve.control.background import Tasks
from loraserve.control.control_plane import ControlPlane
from loraserve.control.names.labels import label_of
from loraserve.control.names.resolve import ResolvedAdapter, Target
from loraserve.control.requests.admitted import Admitted
from loraserve.control.requests.running import Demand, Progress, RouteInfo
from loraserve.control.usage.outcome import Outcome
from loraserve.engine.request import FinishReason
from loraserve.live.requests import EndState
from loraserve.serving.bound_adapter import BoundAdapter
from loraserve.serving.errors import SERVER_FAULTS, ErrorCode, ServingError
from loraserve.serving.generation import Generation, GenerationJob, GenerationService, Prompt, TokenUsage
from loraserve.serving.text.choice import TextOptions
from loraserve.store.records import AdapterDoc, AnyDocument

NOTES_KEY = "loraserve_request_notes"
"""In a scope's state: set if the request is to be reported at its end; otherwise nothing is noted."""


class InferenceCall:
    """`close` may be called at any time and more than once. It never waits: remaining work runs in the background."""

    def __init__(self, calls: "InferenceCalls", admitted: Admitted, received_s: float) -> None:
        self._calls = calls
        self.admitted = admitted
        self._received_s = received_s
        self._held = contextlib.AsyncExitStack()
        self.generation: Generation | None = None
        """None until it starts."""
        self._failed: tuple[EndState, str | None] | None = None
        self.outcome: Outcome | None = None
        """Set when the call is closed."""
        self.adapter_load_ms: float | None = None
        """None for the base model."""
        self.adapter_wait_s: tuple[float, float] | None = None
        """Start and end of the wait for the adapter, whether it was loaded for this request or another; monotonic."""

    @property
    def adapter(self) -> ResolvedAdapter | None:
        return self.admitted.target.adapter

    @property
    def headers(self) -> dict[str, str]:
        """For every response to the request: rate limits, and the adapter version that answers."""
        headers = dict(self.admitted.headers)
        if self.adapter is not None:
            headers["x-adapter-version"] = str(self.adapter.version)
        return headers

    async def start(
        self, prompts: list[Prompt], text: TextOptions, fields: CommonFields, *, max_prompts_at_once: int | None = None
    ) -> Generation:
        """Load the adapter if necessary, then start the generation. Raises `ServingError`."""
        admitted, adapter = self.admitted, self.adapter
        if prompts[0].pooling is None:
            check_has_text(adapter)
        if adapter is not None:
            await check_activated(adapter, prompts, self._calls.generation.tokenizer)
            began_s = time.monotonic()
            held = self._calls.residency.hold(adapter.digest, tenant=admitted.principal.acting_tenant)
            self.adapter_load_ms = await self._held.enter_async_context(held)
            self.adapter_wait_s = began_s, time.monotonic()
        job = GenerationJob(
            prompts,
            None if adapter is None else bound(adapter),
            text,
            self._received_s,
            cache_salt=salted(admitted.kv_salt, fields.cache_salt),
            tenant=admitted.principal.acting_tenant,
            tenant_weight=self._calls.weight_of(admitted.principal.acting_tenant),
            priority=fields.priority,
            max_prompts_at_once=max_prompts_at_once,
            on_first_token=admitted.running.note_started,
        )
        self.generation = self._calls.generation.start(job)
        admitted.running.on_abort(self.generation.end_with)
        return self.generation

    def note(self, error: BaseException) -> None:
        """Record why the call is about to be closed. Only the first error counts.

        NOTE: the error itself is not kept. Its frames refer to this call and the prompt, so only the garbage collector
        could free them, which runs so rarely that 135 refused prompts of 1 MB took 1.3 GB.
        """
        self._failed = self._failed or _ending_by(error)

    def count_error(self, error: ServingError) -> None:
        """Count an error that is sent to the client in the middle of a stream."""
        self._calls.generation.metrics.error(error.code)

    def progress(self) -> Progress:
        generation = self.generation
        if generation is None:
            return Progress(adapter_load_ms=self.adapter_load_ms)
        usage, times = generation.usage(), generation.times()
        return Progress(
            generation.num_sent_prompt_tokens,
            usage.num_cached_tokens,
            usage.num_completion_tokens,
            times.queue_ms,
            self.adapter_load_ms,
            times.ttft_ms,
        )

    def close(self) -> None:
        if self.outcome is not None:
            return
        self.outcome = self._outcome()
        if self.generation is not None:
            self.generation.close()
        if self.adapter is not None:
            if self.outcome.error_code == ErrorCode.ADAPTER_UNREADABLE.value:
                self._calls.residency.mark_damaged(self.adapter.digest)
            self._calls.forget_deleted(self.adapter.tenant, self.adapter.name)
        self._calls.settle(self._settle(self.outcome))

    async def _settle(self, outcome: Outcome) -> None:
        await self._held.aclose()
        await self._calls.admission.finish(self.admitted, outcome)

    def _outcome(self) -> Outcome:
        ending, error_code = self._ending()
        generation = self.generation
        if generation is None:
            return Outcome(ending, FinishReason.ERROR.value, 0, 0, 0, error_code=error_code)
        usage, times = generation.usage(), generation.times()
        is_fault = ending is EndState.FAILED and error_code in SERVER_FAULTS
        if is_fault and not (self.admitted.running.route_info.stream and usage.num_completion_tokens > 0):
            usage = TokenUsage(0, 0, 0)  # nothing was delivered
        return Outcome(
            ending,
            generation.finish_reason.value,
            usage.num_prompt_tokens,
            usage.num_cached_tokens,
            usage.num_completion_tokens,
            queue_ms=times.queue_ms,
            adapter_load_ms=self.adapter_load_ms,
            ttft_ms=times.ttft_ms,
            error_code=error_code,
        )

    def _ending(self) -> tuple[EndState, str | None]:
        ended_with = self.admitted.running.ended_with
        if self.generation is not None and self.generation.finished:
            return EndState.COMPLETED, None
        if ended_with is not None:
            return EndState.ABORTED, ended_with.code.value
        return self._failed or (EndState.ABORTED, None)


def _ending_by(error: BaseException) -> tuple[EndState, str | None]:
    if isinstance(error, asyncio.CancelledError):
        return EndState.ABORTED, None
    if not isinstance(error, ServingError):
        return EndState.FAILED, ErrorCode.INTERNAL_ERROR.value
    was_left = error.code is ErrorCode.CLIENT_CLOSED_REQUEST
    return EndState.ABORTED if was_left else EndState.FAILED, error.code.value


@dataclass(slots=True)
class RequestNotes:
    """Facts about a request, as they become known. None = the request did not get that far."""

    route_info: RouteInfo | None = None
    target: Target | None = None
    """As resolved from the request; the admitted target may be newer."""
    call: InferenceCall | None = None
    """Set on admission."""
    status: int | None = None
    """Of the response, set when that begins."""
    error_code: ErrorCode | None = None
    """Of an error response; not of an error in the middle of a stream."""
    ended_s: float = 0.0
    """`time.monotonic()` when the response had been sent, or the client had gone."""


class InferenceCalls:
    """One per app."""

    def __init__(self, control: ControlPlane, generation: GenerationService) -> None:
        self.resolver = control.resolver
        self.catalog = control.catalog
        self.admission = control.admission
        self.residency = control.residency
        self.generation = generation
        self._settling = Tasks()
        self.catalog.subscribe(self._on_change)

    async def resolve(
        self, request: Request, model: str | None, path_adapter: str | None = None, user: str | None = None
    ) -> Target:
        """See `Resolver.resolve`. Raises `ServingError` also if the server is shutting down."""
        self.generation.lifecycle.check_open()
        return await self.resolver.resolve(principal_of(request), model, path_adapter=path_adapter, user=user)

    @contextlib.asynccontextmanager
    async def admit(self, request: Request, target: Target, demand: Demand) -> AsyncIterator[InferenceCall]:
        """Closes the call if the `async with` body raises; otherwise the recipient closes it. Raises `ServingError`.

        The request's times count from its arrival.
        """
        scope = request.scope
        notes: RequestNotes | None = scope["state"].get(NOTES_KEY)
        if notes is not None:
            notes.route_info, notes.target = demand.route_info, target
        came_in_s = received_s(scope)
        admitted = await self.admission.admit(principal_of(request), target, own_request_id(scope), demand, came_in_s)
        call = InferenceCall(self, admitted, came_in_s)
        if notes is not None:
            notes.call = call
        admitted.running.progress = call.progress
        try:
            yield call
        except BaseException as error:
            call.note(error)
            call.close()
            raise

    def forget_deleted(self, tenant: str, name: str) -> None:
        """Removes the metrics of a deleted adapter: on deletion, and again when a request that used it ends later."""
        document = self.catalog.adapter(tenant, name)
        if document is None or document.doc.deleted_at is not None:
            self.generation.metrics.forget_adapter(label_of(tenant, name))

    def _on_change(self, document: AnyDocument) -> None:
        if isinstance(document.doc, AdapterDoc):
            self.forget_deleted(document.doc.tenant, document.doc.name)

    def weight_of(self, tenant: str) -> float:
        document = self.catalog.tenant(tenant)
        return 1.0 if document is None else document.doc.weight

    def settle(self, work: Coroutine[Any, Any, None]) -> None:
        self._settling.start(work)

    async def wait_settled(self) -> None:
        """Wait until all closed calls are in the usage log."""
        await self._settling.wait()


def bound(adapter: ResolvedAdapter) -> BoundAdapter:
    return BoundAdapter(adapter.name, label_of(adapter.tenant, adapter.name), adapter.digest)


def salted(kv_salt: str, cache_salt: str) -> str:
    """Combines the tenant's salt and the request's; different pairs never give the same text."""
    return f"{len(kv_salt)}:{kv_salt}:{cache_salt}"

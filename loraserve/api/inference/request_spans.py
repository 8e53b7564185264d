"""One span per inference request, with child spans for adapter load, queue, prefill and decode.

Made at the end, when everything is known, so a request in flight costs nothing. Attributes have the names of
OpenTelemetry's semantic conventions for GenAI or of vLLM, or begin with `loraserve.`. None contains a client's texts,
keys or headers.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from litestar.types import HTTPScope
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loraserve.api.http.auth import STATE_KEY as PRINCIPAL_KEY
from loraserve.api.http.processing_time import received_s
from loraserve.api.http.request_id import own_request_id
from loraserve.api.inference.call import InferenceCall, RequestNotes
from loraserve.control.names.resolve import Target
from loraserve.control.requests.running import Route
from loraserve.control.tenancy.principal import Principal
from loraserve.serving.errors import SERVER_FAULTS
from loraserve.serving.generation import Generation

NAME = "loraserve"
DIGEST_CHARACTERS = 12
SHORTEST_WAIT_S = 0.001
"""A shorter wait means that the adapter was already loaded: no span."""
OPERATIONS = {
    Route.CHAT: "chat",
    Route.CLASSIFY: "classify",
    Route.COMPLETIONS: "text_completion",
    Route.EMBEDDINGS: "embeddings",
    Route.GENERATE: "text_completion",
    Route.MESSAGES: "chat",
    Route.RERANK: "rerank",
    Route.RESPONSES: "chat",
    Route.SCORE: "score",
}
PARENT_HEADERS = (b"traceparent", b"tracestate")
MAX_TRACESTATE_CHARS = 512
"""Of all its headers, joined: the length that W3C's Trace Context asks to propagate. A longer one is left out."""

Attributes = dict[str, str | int | float | list[str]]


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str
    began_s: float
    ended_s: float


class RequestSpans:
    """Called on the event loop; takes 0.3 ms per request."""

    def __init__(self, tracer: Tracer, base_name: str) -> None:
        self._tracer = tracer
        self._base_name = base_name
        self._propagator = TraceContextTextMapPropagator()

    def record(self, scope: HTTPScope, notes: RequestNotes) -> None:
        """The `OnEnd` callback."""
        # One offset for all spans: otherwise a clock adjustment could put a child outside its parent.
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path_template']}",
            self._parent(scope),
            SpanKind.SERVER,
            self._attributes(scope, notes),
            start_time=_unix_ns(received_s(scope), offset_ns),
        )
        if span.is_recording():
            self._record_phases(span, notes.call, offset_ns)
            _set_status(span, notes)
        span.end(_unix_ns(notes.ended_s, offset_ns))

    def _parent(self, scope: HTTPScope) -> Context:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            if name in PARENT_HEADERS:
                headers.setdefault(name.decode(), []).append(value.decode("latin-1"))
        if len(",".join(headers.get("tracestate", []))) > MAX_TRACESTATE_CHARS:
            del headers["tracestate"]
        return self._propagator.extract(headers, Context())

    def _record_phases(self, span: Span, call: InferenceCall | None, offset_ns: int) -> None:
        inside = set_span_in_context(span, Context())
        for phase in _phases(call):
            child = self._tracer.start_span(phase.name, inside, start_time=_unix_ns(phase.began_s, offset_ns))
            child.end(_unix_ns(phase.ended_s, offset_ns))

    def _attributes(self, scope: HTTPScope, notes: RequestNotes) -> Attributes:
        attributes: Attributes = {
            "http.request.method": scope["method"],
            "http.route": scope["path_template"],
            "gen_ai.provider.name": NAME,
            "gen_ai.latency.e2e": notes.ended_s - received_s(scope),
            "loraserve.request_id": own_request_id(scope),
        }
        if notes.status is not None:
            attributes["http.response.status_code"] = notes.status
        if notes.route_info is not None:
            attributes["gen_ai.operation.name"] = OPERATIONS[notes.route_info.route]
        principal: Principal | None = scope["state"].get(PRINCIPAL_KEY)
        if principal is not None:
            attributes["loraserve.tenant"] = principal.acting_tenant
        if notes.target is not None:
            attributes |= self._target_attributes(notes.call.admitted.target if notes.call else notes.target)
        if (error_code := _error_code(notes)) is not None:
            attributes["error.type"] = error_code
        return attributes | _call_attributes(notes.call, received_s(scope))

    def _target_attributes(self, target: Target) -> Attributes:
        adapter = target.adapter
        if adapter is None:
            return {"gen_ai.request.model": target.name, "gen_ai.response.model": self._base_name}
        return {
            "gen_ai.request.model": target.name,
            "gen_ai.response.model": f"{adapter.name}@v{adapter.version}",
            "loraserve.adapter.name": adapter.name,
            "loraserve.adapter.version": adapter.version,
            "loraserve.adapter.digest": adapter.digest[:DIGEST_CHARACTERS],
        }


def _call_attributes(call: InferenceCall | None, received_s: float) -> Attributes:
    if call is None or call.outcome is None:
        return {"loraserve.outcome": "refused"}
    attributes: Attributes = {"loraserve.outcome": call.outcome.ending.value}
    if call.generation is not None:
        attributes |= _generation_attributes(call.generation, received_s)
    return attributes


def _generation_attributes(generation: Generation, received_s: float) -> Attributes:
    sampling, usage = generation.prompts[0].engine_request.sampling, generation.usage()
    reasons = [choice.finish_reason for prompt in generation.prompts for choice in prompt.choices]
    attributes: Attributes = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.response.finish_reasons": [reason.value for reason in reasons if reason is not None],
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
    }
    if (phases := generation.phases()) is not None:
        attributes |= {
            "gen_ai.latency.time_in_queue": phases.scheduled_s - phases.sent_s,
            "gen_ai.latency.time_to_first_token": phases.first_token_s - received_s,
            "gen_ai.latency.time_in_model_prefill": phases.first_token_s - phases.scheduled_s,
            "gen_ai.latency.time_in_model_decode": phases.last_token_s - phases.first_token_s,
        }
    return attributes


def _phases(call: InferenceCall | None) -> Iterator[_Phase]:
    if call is None:
        return
    if call.adapter_wait_s is not None:
        began_s, had_s = call.adapter_wait_s
        if had_s - began_s >= SHORTEST_WAIT_S:
            yield _Phase("adapter load", began_s, had_s)
    phases = None if call.generation is None else call.generation.phases()
    if phases is not None:
        yield _Phase("queue", phases.sent_s, phases.scheduled_s)
        yield _Phase("prefill", phases.scheduled_s, phases.first_token_s)
        yield _Phase("decode", phases.first_token_s, phases.last_token_s)


def _error_code(notes: RequestNotes) -> str | None:
    outcome = None if notes.call is None else notes.call.outcome
    return notes.error_code if outcome is None or outcome.error_code is None else outcome.error_code


def _set_status(span: Span, notes: RequestNotes) -> None:
    """Only server faults are errors: by OpenTelemetry's conventions, a client's mistake or disconnect is not."""
    error_code = _error_code(notes)
    if error_code in SERVER_FAULTS:
        span.set_status(Status(StatusCode.ERROR, error_code))


def _unix_ns(monotonic_s: float, offset_ns: int) -> int:
    return int(monotonic_s * 1e9) + offset_ns

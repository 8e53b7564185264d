"""What a client's trace headers do to the span of its request."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loraserve.api.http.processing_time import note_received
from loraserve.api.inference.call import RequestNotes
from loraserve.api.inference.request_spans import MAX_TRACESTATE_CHARS, RequestSpans

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = (b"traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01".encode())


def told(*headers: tuple[bytes, bytes]) -> ReadableSpan:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    scope: Any = {
        "method": "POST",
        "path_template": "/v1/responses",
        "headers": headers,
        "state": {},
    }
    note_received(scope)
    RequestSpans(provider.get_tracer("test"), "base").record(scope, RequestNotes(status=401))
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("num_headers", [1, 2])
def test_a_tracestate_above_the_maximum_length_is_dropped(num_headers: int) -> None:
    """Every span has it: at the most that a client may send, 4 × 8 KB per request would wait for the collector."""
    pairs = [b"k%d=%b" % (index, b"v" * 60) for index in range(8)]
    longest = b",".join([*pairs[:-1], pairs[-1] + b"v"])
    assert len(longest) == MAX_TRACESTATE_CHARS
    for sent, kept in ((longest, longest), (longest + b"v", b"")):
        parts = [sent] if num_headers == 1 else [sent[:63], sent[64:]]
        span = told(PARENT, *((b"tracestate", part) for part in parts))
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.context.trace_state.to_header().encode() == kept

"""A collector that accepts spans sent by OTLP over HTTP, or refuses them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 30.0


@dataclass(slots=True)
class Collector:
    url: str
    bodies: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    status: int = 200
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def spans(self) -> list[Span]:
        return [span for body in self.bodies for span in _spans_of(body)]

    def resource(self) -> dict[str, Any]:
        """Resource attributes of the last batch."""
        (resource_spans,) = ExportTraceServiceRequest.FromString(self.bodies[-1]).resource_spans
        return {item.key: _value(item.value) for item in resource_spans.resource.attributes}

    def wait_for(self, num_requests: int) -> list[Span]:
        """Wait for the spans of that many requests; returns them by start time."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self._requests()) >= num_requests, WAIT_S), self.spans()
        return self._requests()

    def children_of(self, span: Span) -> dict[str, Span]:
        return {child.name: child for child in self.spans() if child.parent_span_id == span.span_id}

    def _requests(self) -> list[Span]:
        spans = [span for span in self.spans() if span.kind == Span.SPAN_KIND_SERVER]
        return sorted(spans, key=lambda span: span.start_time_unix_nano)


def attributes_of(span: Span) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in span.attributes}


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with collector.arrived:
                collector.paths.append(self.path)
                if collector.status == 200:
                    collector.bodies.append(body)
                collector.arrived.notify_all()
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join(WAIT_S)


def _spans_of(body: bytes) -> Iterator[Span]:
    for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope_spans in resource_spans.scope_spans:
            yield from scope_spans.spans


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind or "string_value")

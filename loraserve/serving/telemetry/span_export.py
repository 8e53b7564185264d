"""Sends spans to a collector by OTLP over HTTP, from its own thread.

A slow or failing collector never affects requests: spans that do not fit in the bounded queue are dropped.
OpenTelemetry's SDK reads its environment variables here: samplers, batches, headers, resource attributes.
"""

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

SECRET_PARTS = re.compile(r"(?<=//)[^/@\s]+(?=@)|(?<=\?)[^\s'\")]+|(?<=header value: ).+")
"""Matches secrets in quoted reasons: a URL's user and password, its query (some collectors take keys there), and the
value of a header."""
FLUSH_S = 2.0
"""Time limit at shutdown for spans not sent yet."""
OUR_NAME = "loraserve"

HEADER_LOGGER = "opentelemetry.trace"
"""Warns about every request whose trace headers it cannot parse, and quotes them."""
QUEUE_LOGGER = "opentelemetry.sdk._shared_internal"
"""Warns repeatedly while its queue is full."""
VARIABLE_LOGGER = "opentelemetry.util.re"
"""Warns about malformed headers for the collector, and quotes them."""
EXPORTER_LOGGER = OTLPSpanExporter.__module__
"""Warns about every failed attempt to send a batch."""

logger = logging.getLogger(__name__)


class SpanExport:
    """Runs from construction until `close`."""

    def __init__(self, endpoint: str, shown_endpoint: str, version: str) -> None:
        """shown_endpoint: the endpoint without secrets. Raises the SDK's errors for invalid environment variables."""
        reason = _Reason()
        logging.getLogger(HEADER_LOGGER).setLevel(logging.ERROR)
        self._filters = ((QUEUE_LOGGER, _Once()), (VARIABLE_LOGGER, _without_values), (EXPORTER_LOGGER, reason))
        for name, log_filter in self._filters:
            logging.getLogger(name).addFilter(log_filter)
        self._provider = TracerProvider(resource=_resource(version), shutdown_on_exit=False)
        exporter = _LoggingExporter(OTLPSpanExporter(endpoint=endpoint), shown_endpoint, reason)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer: Tracer = self._provider.get_tracer(OUR_NAME, version)

    async def close(self) -> None:
        """Sends the remaining spans, for at most `FLUSH_S`. Spans that end later are dropped."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # The loop is closed already.
                loop.call_soon_threadsafe(done.set)

        # Not a thread of an executor: the loop, and Python at exit, would wait for it.
        threading.Thread(target=shut_down, name="last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_S):
                await done.wait()
        except TimeoutError:
            logger.warning("the last traces were not sent: the collector took longer than %g s", FLUSH_S)
            return  # The filters stay, so that attempts still running are not logged.
        for name, log_filter in self._filters:
            logging.getLogger(name).removeFilter(log_filter)


def _resource(version: str) -> Resource:
    """Attributes from the environment override ours."""
    ours = Resource({SERVICE_NAME: OUR_NAME, SERVICE_VERSION: version})
    return Resource.create(ours.merge(OTELResourceDetector().detect()).attributes)


class _LoggingExporter(SpanExporter):
    """Logs once that the collector cannot be reached, and once that it can again."""

    def __init__(self, exporter: SpanExporter, shown_endpoint: str, reason: "_Reason") -> None:
        self._exporter = exporter
        self._shown_endpoint = shown_endpoint
        self._reason = reason
        self._num_lost = 0
        """Spans lost since the last success."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._reason.text = ""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._num_lost:
                reason = self._reason.text or "no answer in time"
                logger.warning("traces do not reach %s: %s", self._shown_endpoint, reason)
            self._num_lost += len(spans)
        elif self._num_lost:
            logger.warning("traces reach %s again; %d spans were lost", self._shown_endpoint, self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Reason(logging.Filter):
    """Suppresses the exporter's messages; keeps the first one for a log line of ours."""

    text = ""
    """The first message, without secrets."""

    def filter(self, record: logging.LogRecord) -> bool:
        self.text = self.text or SECRET_PARTS.sub("***", record.getMessage())
        return False


def _without_values(record: logging.LogRecord) -> bool:
    record.args = tuple("***" for _ in record.args or ())
    return True


class _Once(logging.Filter):
    """Lets each message pass only once, whatever its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        is_new = record.msg not in self._passed
        self._passed.add(record.msg)
        return is_new

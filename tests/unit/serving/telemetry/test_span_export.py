"""What is logged about a collector that cannot be reached."""

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest

from loraserve.serving.telemetry.span_export import (
    EXPORTER_LOGGER,
    HEADER_LOGGER,
    QUEUE_LOGGER,
    VARIABLE_LOGGER,
    SpanExport,
)
from tests.support.server_process import wait_until


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Loggers without filters left by other tests' exports; restored at the end."""
    kept = [logging.getLogger(name) for name in (EXPORTER_LOGGER, HEADER_LOGGER, QUEUE_LOGGER, VARIABLE_LOGGER)]
    before = [(logger, logger.level, list(logger.filters)) for logger in kept]
    for logger in kept:
        logger.filters.clear()
    yield
    for logger, level, filters in before:
        logger.setLevel(level)
        logger.filters[:] = filters


def test_the_logged_reason_contains_no_secret_of_the_endpoint(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # the first retry comes after 1 s and logs the reason
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{refusing.getsockname()[1]}"
        export = SpanExport(f"http://me:secret@{address}/v1/traces?key=a%20secret&b=secret", "http://collector", "1")
        export.tracer.start_span("request").end()
        wait_until(lambda: "do not reach" in caplog.text, "it says why")
        asyncio.run(export.close())
    (line,) = [record.getMessage() for record in caplog.records if "do not reach" in record.getMessage()]
    assert line.startswith("traces do not reach http://collector: ")
    assert "/v1/traces?***" in line
    assert "secret" not in caplog.text


def test_closing_removes_the_filters_from_the_loggers() -> None:
    export = SpanExport("http://127.0.0.1:9/v1/traces", "http://collector", "1")
    assert logging.getLogger(EXPORTER_LOGGER).filters
    asyncio.run(export.close())
    assert not [name for name in (EXPORTER_LOGGER, QUEUE_LOGGER, VARIABLE_LOGGER) if logging.getLogger(name).filters]


@pytest.mark.parametrize("headers", ["authorization: Bearer secret", "x-key=secr\u00e9t,x-key=", "x-key=a%0asecret"])
def test_values_of_headers_that_cannot_be_sent_are_not_logged(
    headers: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    export = SpanExport("http://127.0.0.1:9/v1/traces", "http://collector", "1")
    export.tracer.start_span("request").end()
    asyncio.run(export.close())
    assert "header" in caplog.text.lower()
    assert "secr" not in caplog.text

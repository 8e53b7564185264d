import sys

import pytest

from loraserve.cli.serve import trace_settings
from loraserve.cli.serve.trace_settings import FLAG, collector_url, is_collector_url, trace_destination

TRACES, BASE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("flag", "environment", "expected"),
    [
        ("http://a/v1/traces", {TRACES: "http://b", BASE: "http://c"}, (FLAG, "http://a/v1/traces")),
        (None, {TRACES: "http://b/own", BASE: "http://c"}, (TRACES, "http://b/own")),
        (None, {BASE: "http://c:4318"}, (BASE, "http://c:4318/v1/traces")),
        (None, {BASE: "https://c/otlp/"}, (BASE, "https://c/otlp/v1/traces")),
        (None, {BASE: "http://c", "OTEL_TRACES_EXPORTER": "otlp,console"}, (BASE, "http://c/v1/traces")),
        ("http://a/x", {"OTEL_TRACES_EXPORTER": "none"}, (FLAG, "http://a/x")),
        ("http://a/x", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, (FLAG, "http://a/x")),
    ],
)
def test_the_destination_is_taken_from_the_flag_or_from_opentelemetry_variables(
    flag: str | None, environment: dict[str, str], expected: tuple[str, str]
) -> None:
    destination = trace_destination(flag, environment)
    assert destination is not None
    assert (destination.source, destination.endpoint) == expected
    assert destination.problem is None
    assert destination.is_fatal == (flag is not None)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {TRACES: "", BASE: ""},
        {BASE: "http://c", "OTEL_TRACES_EXPORTER": "none"},
        {BASE: "http://c", "OTEL_SDK_DISABLED": "TRUE"},
    ],
)
def test_there_is_no_destination_if_none_is_given_or_tracing_is_switched_off(environment: dict[str, str]) -> None:
    assert trace_destination(None, environment) is None


def test_a_flag_with_a_disabled_sdk_is_a_problem_but_not_fatal() -> None:
    destination = trace_destination("http://a/v1/traces", {"OTEL_SDK_DISABLED": "true"})
    assert destination is not None
    assert (destination.problem, destination.is_fatal) == ("OTEL_SDK_DISABLED is true", False)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({TRACES: "grpc://c:4317"}, "it is not the URL of an OTLP/HTTP collector"),
        ({BASE: "collector:4318"}, "it is not the URL"),
        ({BASE: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"),
        (
            {
                BASE: "http://c",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json'",
        ),
        ({BASE: "http://c", "OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'"),
    ],
)
def test_an_unsupported_destination_is_a_problem_that_names_the_cause(environment: dict[str, str], said: str) -> None:
    destination = trace_destination(None, environment)
    assert destination is not None
    assert destination.problem is not None
    assert said in destination.problem


def test_missing_packages_are_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    destination = trace_destination("http://a/v1/traces", {})
    assert destination is not None
    assert destination.problem == f"traces need additional packages: {trace_settings.INSTALL}"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ("http://c/otlp/v1/traces", "http://c/otlp/v1/traces"),
    ],
)
def test_a_url_without_a_path_gets_the_default_path_of_collectors(given: str, meant: str) -> None:
    assert collector_url(given) == meant


@pytest.mark.parametrize("text", ["", "c:4318", "grpc://c:4317", "http://", "http://c:port", "http://[c", "http://c:0"])
def test_an_invalid_http_url_is_refused(text: str) -> None:
    assert not is_collector_url(text)
    with pytest.raises(ValueError, match="is not the URL of an OTLP/HTTP collector"):
        collector_url(text)

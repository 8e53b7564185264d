"""Whether traces are sent, and where to: what `--otlp-traces-endpoint` and OpenTelemetry's own variables say."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

FLAG = "--otlp-traces-endpoint"
TRACES_PATH = "/v1/traces"
A_URL = "the URL of an OTLP/HTTP collector, such as http://collector:4318/v1/traces"
PACKAGE = "opentelemetry.exporter.otlp.proto.http"
INSTALL = "pip install 'loraserve[otel]'"
PROTOCOL = "http/protobuf"
ENDPOINT_VARIABLE, BASE_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
DISABLED_VARIABLE = "OTEL_SDK_DISABLED"
EXPORTER = "otlp"
EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True, slots=True)
class TraceDestination:
    endpoint: str
    """The whole URL that spans are posted to."""
    source: str
    """What named it, for messages."""
    problem: str | None
    """Why nothing is sent there."""
    is_fatal: bool = False
    """Whether the server does not start with such a problem: variables are what platforms give to all they run."""


def trace_destination(flag: str | None, environment: Mapping[str, str]) -> TraceDestination | None:
    """None = no traces. flag: the option's value, a `collector_url`. An empty variable is as good as none."""
    is_disabled = environment.get(DISABLED_VARIABLE, "").strip().lower() == "true"
    if flag:
        if is_disabled:
            return TraceDestination(flag, FLAG, f"{DISABLED_VARIABLE} is true")
        return TraceDestination(flag, FLAG, _problem(flag, environment), is_fatal=True)
    named = _named(environment)
    exporters = environment.get(EXPORTER_VARIABLE) or EXPORTER
    if named is None or is_disabled or exporters == "none":
        return None
    variable, endpoint = named
    if EXPORTER not in exporters.split(","):
        return TraceDestination(endpoint, variable, f"{EXPORTER_VARIABLE} is {exporters!r}; we have only {EXPORTER!r}")
    return TraceDestination(endpoint, variable, _problem(endpoint, environment))


def collector_url(text: str) -> str:
    """With the path that collectors take spans at, where it has none: nobody who leaves it out means another.

    Raises `ValueError` for what is no URL of HTTP.
    """
    if not is_collector_url(text):
        raise ValueError(f"{text!r} is not {A_URL}")
    parts = urlsplit(text)
    return text if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


def is_collector_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        return False


def _named(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """A variable and the endpoint it means: one is of traces alone, the other of what has a path for each signal."""
    if endpoint := environment.get(ENDPOINT_VARIABLE):
        return ENDPOINT_VARIABLE, endpoint
    if base := environment.get(BASE_VARIABLE):
        return BASE_VARIABLE, base.removesuffix("/") + TRACES_PATH
    return None


def _problem(endpoint: str, environment: Mapping[str, str]) -> str | None:
    if not is_collector_url(endpoint):
        return f"it is not {A_URL}"  # not shown: it goes into a log, and may have a password
    for variable in PROTOCOL_VARIABLES:
        if protocol := environment.get(variable):
            if protocol.strip() != PROTOCOL:
                return f"{variable} is {protocol!r}; spans go by OTLP over HTTP, {PROTOCOL!r}"
            break
    if not _is_installed():
        return f"traces need more packages: {INSTALL}"
    return None


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ImportError:
        return False

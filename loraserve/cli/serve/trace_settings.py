"""Whether and where traces are sent, according to `--otlp-traces-endpoint` and OpenTelemetry's own variables."""

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
    """The flag or variable that named it, for messages."""
    problem: str | None
    """Why no traces can be sent there; None = they can."""
    is_fatal: bool = False
    """Whether a problem stops the start. Not if a variable named it: platforms set those for every program they run."""


def trace_destination(flag: str | None, environment: Mapping[str, str]) -> TraceDestination | None:
    """None = no traces. flag: the option's value, a `collector_url`. An empty variable counts as unset."""
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
        return TraceDestination(
            endpoint, variable, f"{EXPORTER_VARIABLE} is {exporters!r}; we support only {EXPORTER!r}"
        )
    return TraceDestination(endpoint, variable, _problem(endpoint, environment))


def collector_url(text: str) -> str:
    """Adds the collectors' standard path if the URL has none. Raises `ValueError` for text that is not an HTTP URL."""
    if not is_collector_url(text):
        raise ValueError(f"{text!r} is not {A_URL}")
    parts = urlsplit(text)
    return text if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


def is_collector_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is not a number
        return False


def _named(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """A variable and its endpoint: one variable is for traces alone; the other is a base URL with a path per signal."""
    if endpoint := environment.get(ENDPOINT_VARIABLE):
        return ENDPOINT_VARIABLE, endpoint
    if base := environment.get(BASE_VARIABLE):
        return BASE_VARIABLE, base.removesuffix("/") + TRACES_PATH
    return None


def _problem(endpoint: str, environment: Mapping[str, str]) -> str | None:
    if not is_collector_url(endpoint):
        return f"it is not {A_URL}"  # not shown: the URL may contain a password, and this is logged
    for variable in PROTOCOL_VARIABLES:
        if protocol := environment.get(variable):
            if protocol.strip() != PROTOCOL:
                return f"{variable} is {protocol!r}; only OTLP over HTTP is supported, {PROTOCOL!r}"
            break
    if not _is_installed():
        return f"traces need additional packages: {INSTALL}"
    return None


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ImportError:
        return False

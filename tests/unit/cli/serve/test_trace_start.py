import asyncio
import io

import pytest
from rich.console import Console

from loraserve.cli.serve.start_error import StartError
from loraserve.cli.serve.trace_settings import FLAG, TraceDestination
from loraserve.cli.serve.trace_start import opened_traces, usable

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
URL = "http://user:hunter2@127.0.0.1:1/v1/traces"


def opened(destination: TraceDestination | None) -> tuple[bool, str]:
    """Whether requests are traced, and the output printed."""
    said = Console(file=io.StringIO(), width=200)

    async def opening() -> bool:
        async with opened_traces(usable(destination, said), "base", said) as on_end:
            return on_end is not None

    is_told = asyncio.run(opening())
    assert isinstance(said.file, io.StringIO)
    return is_told, said.file.getvalue().strip()


def test_the_traces_endpoint_is_printed_without_its_password() -> None:
    assert opened(None) == (False, "")
    assert opened(TraceDestination(URL, VARIABLE, None)) == (
        True,
        "traces are sent to http://user:***@127.0.0.1:1/v1/traces",
    )


def test_a_problem_stops_the_start_only_if_the_endpoint_was_given_by_flag() -> None:
    assert opened(TraceDestination(URL, VARIABLE, "it rains")) == (
        False,
        f"no traces are sent, although {VARIABLE} is set: it rains",
    )
    with pytest.raises(StartError, match=f"{FLAG}: it rains"):
        opened(TraceDestination(URL, FLAG, "it rains", is_fatal=True))


def test_an_invalid_sdk_variable_stops_the_start_only_if_the_endpoint_was_given_by_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    is_told, said = opened(TraceDestination(URL, VARIABLE, None))
    assert not is_told
    assert said.startswith(f"no traces are sent, although {VARIABLE} is set: ValueError: max_queue_size")
    with pytest.raises(StartError, match="max_queue_size"):
        opened(TraceDestination(URL, FLAG, None, is_fatal=True))

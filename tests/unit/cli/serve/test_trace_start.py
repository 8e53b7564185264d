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
    """Whether anything is told of requests, and what was said."""
    said = Console(file=io.StringIO(), width=200)

    async def opening() -> bool:
        async with opened_traces(usable(destination, said), "base", said) as on_end:
            return on_end is not None

    is_told = asyncio.run(opening())
    assert isinstance(said.file, io.StringIO)
    return is_told, said.file.getvalue().strip()


def test_it_is_said_where_traces_go_without_the_password() -> None:
    assert opened(None) == (False, "")
    assert opened(TraceDestination(URL, VARIABLE, None)) == (
        True,
        "traces are sent to http://user:***@127.0.0.1:1/v1/traces",
    )


def test_a_problem_ends_the_start_only_where_this_server_was_told_to_send_traces() -> None:
    assert opened(TraceDestination(URL, VARIABLE, "it rains")) == (
        False,
        f"no traces are sent, although {VARIABLE} is set: it rains",
    )
    with pytest.raises(StartError, match=f"{FLAG}: it rains"):
        opened(TraceDestination(URL, FLAG, "it rains", is_fatal=True))


def test_so_does_a_variable_that_the_sdk_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    is_told, said = opened(TraceDestination(URL, VARIABLE, None))
    assert not is_told
    assert said.startswith(f"no traces are sent, although {VARIABLE} is set: ValueError: max_queue_size")
    with pytest.raises(StartError, match="max_queue_size"):
        opened(TraceDestination(URL, FLAG, None, is_fatal=True))

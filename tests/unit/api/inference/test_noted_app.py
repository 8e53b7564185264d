"""Reporting a request at its end does not affect the request."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from litestar.types import HTTPScope, Message, Receive, Scope, Send

from loraserve.api.http.needs import INFERENCE
from loraserve.api.inference.call import RequestNotes
from loraserve.api.inference.noted_app import NotedApp


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def fail(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("of the app")


def cannot_tell(scope: HTTPScope, notes: RequestNotes) -> None:
    raise ValueError("of who tells")


def ask(app: NotedApp) -> list[Message]:
    scope: Any = {"type": "http", "state": {}, "route_handler": SimpleNamespace(opt=INFERENCE)}
    sent: list[Message] = []

    async def receive() -> Any:
        raise AssertionError("nobody reads")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


def test_a_failure_to_report_a_request_does_not_affect_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    assert [message["type"] for message in ask(NotedApp(answer, cannot_tell))] == ["http.response.start"]
    with pytest.raises(RuntimeError, match="of the app"):
        ask(NotedApp(fail, cannot_tell))
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.ERROR, "a request could not be reported")
    ] * 2

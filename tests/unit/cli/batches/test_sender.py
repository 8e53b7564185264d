import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec import Raw

from loraserve.cli.async_http_client import async_http_client
from loraserve.cli.batches import sender as module
from loraserve.cli.batches.batch_answer import BatchAnswer
from loraserve.cli.batches.batch_requests import BatchRequest
from loraserve.cli.batches.sender import Sender
from tests.support.loopback import client_of

REQUEST = BatchRequest("a", "/v1/completions", {"model": Raw(b'"m"'), "prompt": Raw(b'"x"')})
Reply = Callable[[], web.StreamResponse]


def busy(status: int = 429, **headers: str) -> Reply:
    return lambda: web.json_response({"error": {"message": "later", "code": "busy"}}, status=status, headers=headers)


def done() -> web.StreamResponse:
    return web.json_response({"text": "y"}, headers={"x-request-id": "r"})


def answered(*replies: Reply, retry_for_s: float = 300.0, model: str | None = None) -> tuple[BatchAnswer, list[Any]]:
    """The answer, and what was sent, when the server gives those replies, the last one again and again."""
    sent: list[Any] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        sent.append((request.path, request.content_type, await request.json()))
        return replies[min(len(sent), len(replies)) - 1]()

    async def ask() -> BatchAnswer:
        async with client_of(handle) as client:
            return await Sender(client, model, retry_for_s).answer_to(REQUEST)

    return asyncio.run(ask()), sent


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of which nothing is waited for."""
    times: list[float] = []

    async def sleep(seconds: float) -> None:
        times.append(seconds)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    return times


def test_an_answer_is_the_servers() -> None:
    answer, sent = answered(done)
    assert sent == [("/v1/completions", "application/json", {"model": "m", "prompt": "x"})]
    assert answer.failure is answer.error is None
    assert answer.response is not None
    assert (answer.custom_id, answer.response.status_code, answer.response.request_id) == ("a", 200, "r")
    assert msgspec.json.decode(answer.response.body) == {"text": "y"}
    assert answer.id.startswith("batch_req_")


def test_another_model_is_asked() -> None:
    assert answered(done, model="sql")[1][0][2] == {"model": "sql", "prompt": "x"}


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_what_may_pass_is_sent_again(status: int, slept: list[float]) -> None:
    answer, sent = answered(busy(status), busy(status), done)
    assert answer.failure is None
    assert len(sent) == 3
    assert 0.25 <= slept[0] <= 0.5 <= slept[1] <= 1


def test_a_page_of_a_proxy_may_pass(slept: list[float]) -> None:
    answer, _ = answered(lambda: web.Response(status=502, text="<html>"), done)
    assert answer.failure is None
    assert len(slept) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_what_may_not_is_sent_once(status: int, slept: list[float]) -> None:
    answer, sent = answered(busy(status), done)
    assert (len(sent), slept) == (1, [])
    assert answer.failure is not None
    assert answer.failure.code == f"HTTP {status} busy"
    assert answer.response is not None
    assert answer.response.status_code == status


@pytest.mark.parametrize("status", [200, 307, 404])
def test_what_is_no_json_is_a_failure(status: int, slept: list[float]) -> None:
    answer, sent = answered(lambda: web.Response(status=status, text="<html>"), done)
    assert (len(sent), slept, answer.response) == (1, [], None)
    assert answer.failure is not None
    assert (answer.failure.code, answer.failure.message) == (f"HTTP {status} without JSON", "<html>")


def test_a_servers_pause_is_kept(slept: list[float]) -> None:
    answered(busy(**{"retry-after": "7"}), busy(**{"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}), done)
    assert 7 <= slept[0] <= 7.5
    assert slept[1] <= 1


def test_pauses_grow_to_a_limit(slept: list[float]) -> None:
    answered(*[busy()] * 9, done)
    assert len(slept) == 9
    assert 4 <= min(slept[-4:]) <= max(slept) <= 8


@pytest.mark.parametrize(("retry_for_s", "headers"), [(0.0, {}), (300.0, {"retry-after": "3600"})])
def test_it_is_given_up_where_a_pause_would_be_too_long(
    retry_for_s: float, headers: dict[str, str], slept: list[float]
) -> None:
    answer, sent = answered(busy(**headers), done, retry_for_s=retry_for_s)
    assert (len(sent), slept) == (1, [])
    assert answer.failure is not None
    assert answer.failure.code == "HTTP 429 busy"


def test_a_server_that_is_not_there_is_asked_again(refusing_port: int, slept: list[float]) -> None:
    async def ask(retry_for_s: float) -> BatchAnswer:
        async with async_http_client(f"http://127.0.0.1:{refusing_port}", None) as client:
            return await Sender(client, None, retry_for_s).answer_to(REQUEST)

    answer = asyncio.run(ask(0.6))
    assert answer.response is None
    assert answer.failure is answer.error is not None
    assert answer.error.code == "connection"
    assert slept


def test_a_silent_server_is_a_timeout(slept: list[float]) -> None:
    async def ask() -> BatchAnswer:
        given_up = asyncio.Event()

        async def handle(_: web.Request) -> web.StreamResponse:
            await given_up.wait()
            raise AssertionError

        async with client_of(handle) as client:
            url = str(client._base_url)
            async with async_http_client(url, None, timeout_s=0.05) as impatient:
                answer = await Sender(impatient, None, 0).answer_to(REQUEST)
            given_up.set()
            return answer

    failure = asyncio.run(ask()).failure
    assert failure is not None
    assert failure.code == "timeout"

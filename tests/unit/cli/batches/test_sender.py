import asyncio

import msgspec
import pytest
from aiohttp import web
from msgspec import Raw

from loraserve.cli.async_http_client import async_http_client
from loraserve.cli.batches.batch_requests import BatchRequest
from loraserve.cli.batches.sender import Attempt, Sender, Trouble
from tests.support.loopback import Handler, client_of

REQUEST = BatchRequest("a", "/v1/completions", {"model": Raw(b'"m"'), "prompt": Raw(b'"x"')})


def attempt_at(handler: Handler, fields: dict[str, object] | None = None, timeout_s: float = 60.0) -> Attempt:
    async def send() -> Attempt:
        async with client_of(handler) as client:
            return await Sender(client, fields or {}, timeout_s).send(REQUEST)

    return asyncio.run(send())


def attempt_with(response: web.StreamResponse) -> Attempt:
    async def handle(_: web.Request) -> web.StreamResponse:
        return response

    return attempt_at(handle)


@pytest.mark.parametrize("fields", [{}, {"model": "sql"}, {"priority": 3}])
def test_a_successful_answer_has_the_servers_status_request_id_and_body(fields: dict[str, object]) -> None:
    async def echo(request: web.Request) -> web.Response:
        got = [request.path, request.content_type, await request.json()]
        return web.json_response({"got": got}, headers={"x-request-id": "r"})

    attempt = attempt_at(echo, fields)
    answer = attempt.answer
    assert (attempt.status, attempt.trouble, answer.failure, answer.error) == (200, None, None, None)
    assert answer.response is not None
    assert (answer.custom_id, answer.response.status_code, answer.response.request_id) == ("a", 200, "r")
    body = {"model": "m", "prompt": "x", **fields}
    assert msgspec.json.decode(answer.response.body) == {"got": ["/v1/completions", "application/json", body]}
    assert answer.id.startswith("batch_req_")


@pytest.mark.parametrize("body", ['{"text": 1.10}\n', '{\n  "text":\r\n 1.10\n}'])
def test_a_body_becomes_one_line(body: str) -> None:
    answer = attempt_with(web.Response(text=body, content_type="application/json")).answer
    assert answer.response is not None
    assert bytes(answer.response.body) == b'{"text":1.10}'


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        *[(status, None) for status in (400, 401, 403, 404, 413, 422)],
        *[(status, Trouble.AWAY) for status in (408, 502, 503, 504)],
        (429, Trouble.REFUSED),
        (500, Trouble.ERROR),
        (507, Trouble.ERROR),
    ],
)
@pytest.mark.parametrize("is_json", [True, False])
def test_the_status_determines_whether_a_request_may_be_retried(
    status: int, trouble: Trouble | None, is_json: bool
) -> None:
    attempt = _failed(status, is_json)
    assert attempt.trouble is trouble
    assert attempt.has_no_key is (status == 401)


def _failed(status: int, is_json: bool) -> Attempt:
    """An attempt whose failure names the status."""
    error = {"error": {"message": "later", "code": "busy"}}
    response = web.json_response(error, status=status) if is_json else web.Response(text="<html>", status=status)
    attempt = attempt_with(response)
    assert attempt.answer.failure is not None
    assert attempt.answer.failure.code == f"HTTP {status} {'busy' if is_json else 'without a JSON object'}"
    assert (attempt.answer.response is None) is not is_json
    return attempt


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[1]", b'{"a":1', b'{"a":"\xff"}', b'{"a":"x\ny"}', b'{"a":' + b"[" * 10**5]
)
def test_a_body_that_is_no_json_object_is_a_failure_that_quotes_its_start(body: bytes) -> None:
    answer = attempt_with(web.Response(body=body)).answer
    assert answer.response is None
    assert answer.failure is answer.error
    assert answer.error is not None
    assert answer.error.code == "HTTP 200 without a JSON object"
    assert answer.error.message == body[:200].decode(errors="replace")


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("0.5", 0.5), ("-1", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None)]
)
def test_retry_after_is_read_in_seconds_only(value: str, seconds: float | None) -> None:
    response = web.json_response({"error": {}}, status=429, headers={"retry-after": value})
    assert attempt_with(response).retry_after_s == seconds


def test_a_redirect_is_not_followed() -> None:
    attempt = attempt_with(web.Response(status=307, headers={"location": "/elsewhere"}))
    assert (attempt.status, attempt.trouble) == (307, None)


def test_a_refused_connection_may_be_retried(refusing_port: int) -> None:
    async def send() -> Attempt:
        async with async_http_client(f"http://127.0.0.1:{refusing_port}", None) as client:
            return await Sender(client, {}, 60).send(REQUEST)

    attempt = asyncio.run(send())
    assert (attempt.status, attempt.trouble, attempt.answer.response) == (None, Trouble.AWAY, None)
    assert attempt.answer.failure is not None
    assert attempt.answer.failure.code == "connection"


@pytest.mark.parametrize("is_trickling", [False, True])
def test_an_answer_that_takes_too_long_times_out(is_trickling: bool) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if is_trickling:
            await response.prepare(request)
        while True:
            await asyncio.sleep(0.02)
            if is_trickling:
                await response.write(b" ")

    attempt = attempt_at(handle, timeout_s=0.1)
    assert attempt.trouble is Trouble.AWAY
    assert attempt.answer.failure is not None
    assert attempt.answer.failure.code == "timeout"

import aiohttp
import pytest

from loraserve.cli.failure import Failure, from_event, from_exception, from_status

NOT_FOUND = b'{"error":{"message":"no such model","type":"NotFoundError","code":"model_not_found","param":null}}'


@pytest.mark.parametrize(
    ("status", "body", "failure"),
    [
        (404, NOT_FOUND, Failure("HTTP 404 model_not_found", "no such model")),
        # vLLM's code is the status; its type says more.
        (
            404,
            b'{"error":{"message":"no such model","type":"NotFoundError","code":404}}',
            Failure("HTTP 404 NotFoundError", "no such model"),
        ),
        (422, b'{"error":"too long","error_type":"validation"}', Failure("HTTP 422 validation", "too long")),
        (400, b'{"object":"error","message":"old form"}', Failure("HTTP 400", "old form")),
        (502, b"<html>", Failure("HTTP 502", "<html>")),
    ],
)
def test_errors_of_every_kind_of_server_get_a_code(status: int, body: bytes, failure: Failure) -> None:
    assert from_status(status, body) == failure


def test_an_error_within_a_stream_gets_a_code_too() -> None:
    assert from_event({"message": "died", "code": "engine_dead"}) == Failure("stream engine_dead", "died")
    assert from_event("died") == Failure("stream", "died")
    assert from_event(7) == Failure("stream", '{"error":7}')


def test_timeouts_and_lost_connections_have_different_codes() -> None:
    assert from_exception(aiohttp.SocketTimeoutError("slow")).code == "timeout"
    assert from_exception(aiohttp.ServerDisconnectedError()).code == "connection"

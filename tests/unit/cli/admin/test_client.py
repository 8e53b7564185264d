import httpx
import pytest
from click.testing import CliRunner

from loraserve.cli.admin import client as client_module
from loraserve.cli.admin.client import TIMEOUT_S
from loraserve.cli.main import main


@pytest.mark.parametrize(("drain_s", "least_s"), [("0", TIMEOUT_S), ("600", TIMEOUT_S + 600)])
def test_a_removal_is_waited_for_as_long_as_what_runs_gets(
    monkeypatch: pytest.MonkeyPatch, drain_s: str, least_s: float
) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"status": "deleted"})

    def client(*_: object) -> httpx.Client:
        return httpx.Client(base_url="http://server", timeout=TIMEOUT_S, transport=httpx.MockTransport(answer))

    monkeypatch.setattr(client_module, "http_client", client)
    result = CliRunner().invoke(main, ["adapter", "remove", "sql", "--drain-s", drain_s])
    assert "sql is deleted;" in result.output
    (request,) = asked
    assert float(request.url.params["drain_s"]) == float(drain_s)
    assert request.extensions["timeout"]["read"] == least_s

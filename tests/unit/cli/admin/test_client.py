from typing import Any

import httpx
import pytest
import rich_click as click
from click.testing import CliRunner

from loraserve.cli.admin import client as client_module
from loraserve.cli.admin.client import REQUEST_ID, TIMEOUT_S, AdminClient
from loraserve.cli.main import main
from tests.support.demo_questions import ADAPTER_DIR

OURS = {REQUEST_ID: "r"}


@pytest.mark.parametrize(("drain_s", "least_s"), [("0", TIMEOUT_S), ("600", TIMEOUT_S + 600)])
def test_the_timeout_of_a_removal_includes_the_drain_time(
    monkeypatch: pytest.MonkeyPatch, drain_s: str, least_s: float
) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, headers=OURS, json={"status": "deleted"})

    def client(*_: object) -> httpx.Client:
        return httpx.Client(base_url="http://server", timeout=TIMEOUT_S, transport=httpx.MockTransport(answer))

    monkeypatch.setattr(client_module, "http_client", client)
    result = CliRunner().invoke(main, ["adapter", "remove", "sql", "--drain-s", drain_s])
    assert "sql is deleted;" in result.output
    (request,) = asked
    assert float(request.url.params["drain_s"]) == float(drain_s)
    assert request.extensions["timeout"]["read"] == least_s


def test_a_list_is_read_to_its_end_if_pages_are_shorter_than_requested() -> None:
    limits: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        start, limit = int(request.url.params.get("cursor", "0")), int(request.url.params["limit"])
        limits.append(limit)
        end = min(start + min(limit, 2), 7)
        items = [{"id": number} for number in range(start, end)]
        return httpx.Response(200, headers=OURS, json={"data": items, "next_cursor": str(end) if end < 7 else None})

    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as http:
        client = AdminClient(http)
        assert [item["id"] for item in client.first("/v1/audit", 5)] == [0, 1, 2, 3, 4]
        assert limits == [5, 3, 1]
        assert len(client.first("/v1/audit", 9)) == 7


@pytest.mark.parametrize(
    ("content", "named"),
    [({"html": "<html>Log in</html>"}, "text/html"), ({"json": {"ok": True}}, "application/json and without")],
)
@pytest.mark.parametrize(
    "command", ["adapter list", "keys revoke k3v2m7qa", f"adapter add sql {ADAPTER_DIR / 'spell'}", "audit --csv"]
)
def test_a_response_that_is_not_from_loraserve_is_an_error(
    monkeypatch: pytest.MonkeyPatch, command: str, content: dict[str, Any], named: str
) -> None:
    page = httpx.MockTransport(lambda _: httpx.Response(200, **content))
    monkeypatch.setattr(client_module, "http_client", lambda *_: httpx.Client(base_url="http://server", transport=page))
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    words = [word for word in result.output.split() if word != "│"]
    assert f"answers with {named}" in " ".join(words)


NAME = "NAME"
NAMED = [
    ("adapter", "show", NAME),
    ("adapter", "remove", NAME),
    ("adapter", "remove", NAME, "--version", "1"),
    ("adapter", "restore", NAME),
    ("adapter", "rollback", NAME),
    ("adapter", "pin", NAME),
    ("adapter", "pin", NAME, "--off"),
    ("adapter", "alias", NAME, "prod", "1"),
    ("adapter", "alias", "sql", NAME, "--delete"),
    ("keys", "revoke", NAME),
    ("keys", "rotate", NAME),
    ("tenants", "update", NAME, "--weight", "2"),
    ("tenants", "update", NAME, "--max-queued", "2"),
    ("tenants", "remove", NAME),
    ("tenants", "restore", NAME),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """Requests to a server that answers everything with 404."""
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(404, json={"error": {"message": "There is none."}})

    def client(*_: object) -> httpx.Client:
        return httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))

    monkeypatch.setattr(client_module, "http_client", client)
    return requests


@pytest.mark.parametrize("command", NAMED, ids=" ".join)
def test_an_invalid_name_is_refused_without_a_request(asked: list[httpx.Request], command: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError, match=r"'\.\./tenants/bob' is not a valid name"):
        main([word.replace(NAME, "../tenants/bob") for word in command], standalone_mode=False)
    assert asked == []


@pytest.mark.parametrize("command", NAMED, ids=" ".join)
def test_a_name_is_sent_as_one_path_segment(asked: list[httpx.Request], command: tuple[str, ...]) -> None:
    with pytest.raises(click.ClickException, match="There is none"):
        main([word.replace(NAME, "sql#old?drain_s=0") for word in command], standalone_mode=False)
    assert b"sql%23old%3Fdrain_s%3D0" in asked[0].url.raw_path.partition(b"?")[0].split(b"/")


@pytest.mark.parametrize("key", ["hidden\n", "hidden\r", "hiddén"])
def test_a_key_that_no_header_can_carry_is_refused_without_quoting_it(key: str) -> None:
    result = CliRunner().invoke(main, ["adapter", "list", "--url", "http://127.0.0.1:1", "--api-key", key])
    assert result.exit_code == 1
    assert "the value of authorization has a line break" in result.output
    assert "hid" not in result.output

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import rich_click as click

from loraserve.cli.admin import client as client_module
from loraserve.cli.admin.tenants import MAX_TRIES
from loraserve.cli.main import main

OURS = {client_module.REQUEST_ID: "r"}

UPDATE = ["tenants", "update", "acme", "--requests-per-min", "7", "--json"]


class Server:
    """Has one tenant, which others may change between a command's read and its update."""

    def __init__(self) -> None:
        self.rev = 1
        self.limits: dict[str, Any] = {"requests_per_min": None, "tokens_per_min": None}
        self.between: Callable[[], None] = lambda: None
        self.num_reads = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            self.num_reads += 1
            seen = self._item()
            self.between()
            return seen
        if request.headers.get("if-match", f'"{self.rev}"') != f'"{self.rev}"':
            return httpx.Response(412, json={"error": {"message": "It is at another revision."}})
        self.change(**json.loads(request.content).get("limits", {}))
        return self._item()

    def change(self, **limits: Any) -> None:
        self.limits = self.limits | limits
        self.rev += 1

    def _item(self) -> httpx.Response:
        return httpx.Response(200, headers=OURS, json={"id": "acme", "rev": self.rev, "limits": self.limits})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()

    def client(*_: object) -> httpx.Client:
        return httpx.Client(base_url="http://server", transport=httpx.MockTransport(made.answer))

    monkeypatch.setattr(client_module, "http_client", client)
    return made


def test_limits_that_another_client_sets_concurrently_are_kept(server: Server) -> None:
    def once() -> None:
        server.between = lambda: None
        server.change(tokens_per_min=1000)

    server.between = once
    main(UPDATE, standalone_mode=False)
    assert server.limits == {"requests_per_min": 7, "tokens_per_min": 1000}
    assert server.num_reads == 2


def test_an_update_is_given_up_if_others_change_the_tenant_during_every_try(server: Server) -> None:
    server.between = lambda: server.change(tokens_per_min=server.rev)
    with pytest.raises(click.ClickException, match=f"Others changed the tenant during each of {MAX_TRIES} tries"):
        main(UPDATE, standalone_mode=False)
    assert server.limits["requests_per_min"] is None
    assert server.num_reads == MAX_TRIES


def test_a_change_without_limits_does_not_read_the_tenant_first(server: Server) -> None:
    main(["tenants", "update", "acme", "--weight", "2", "--json"], standalone_mode=False)
    assert server.num_reads == 0

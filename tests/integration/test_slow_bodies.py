"""A body may take as long as its sender likes: the key's state when the last byte arrives decides."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.management import client, new_key, offline_admin_key
from tests.support.server_process import WAIT_S, serve_fake, stop, wait_until


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    data_dir = tmp_path_factory.mktemp("slow") / "data"
    key = offline_admin_key(data_dir)
    with serve_fake(data_dir) as server, client(server, key) as admin:
        admin.post("/v1/tenants", json={"id": "acme"}).raise_for_status()
        yield admin
        stop(server)


class SlowRequest:
    """A request that is sent except for its last byte."""

    def __init__(self, admin: httpx.Client, key: str | None, method: str, path: str, asked: dict[str, object]) -> None:
        body = json.dumps(asked).encode()
        self._last = body[-1:]
        self._connection = http.client.HTTPConnection(urlsplit(str(admin.base_url)).netloc, timeout=WAIT_S)
        self._connection.putrequest(method, path)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        if key is not None:
            headers["x-api-key"] = key
        for name, value in headers.items():
            self._connection.putheader(name, value)
        self._connection.endheaders(body[:-1])

    def finish(self) -> tuple[int, str]:
        """Sends the last byte; returns the status and the error code."""
        self._connection.send(self._last)
        response = self._connection.getresponse()
        error = json.loads(response.read())["error"]
        self._connection.close()
        return response.status, error["code"]


def test_a_key_revoked_during_the_body_cannot_make_another_key(admin: httpx.Client) -> None:
    stolen = new_key(admin, "acme", "admin")
    slow = SlowRequest(admin, stolen["secret"], "POST", "/v1/keys", {"role": "admin", "tenant": "acme"})
    assert admin.get("/v1/keys", params={"tenant": "acme"}).status_code == 200
    assert admin.delete(f"/v1/keys/{stolen['id']}").status_code == 204
    assert slow.finish() == (401, "invalid_api_key")
    keys = admin.get("/v1/keys", params={"tenant": "acme"}).json()["data"]
    assert [key["id"] for key in keys if key["status"] == "active"] == []


def test_a_secret_rotated_during_the_body_cannot_make_a_key(admin: httpx.Client) -> None:
    stolen = new_key(admin, "acme", "admin")
    before = len(admin.get("/v1/keys").json()["data"])
    slow = SlowRequest(admin, stolen["secret"], "POST", "/v1/keys", {"role": "admin", "tenant": "acme"})
    assert admin.get("/v1/keys").status_code == 200
    assert admin.post(f"/v1/keys/{stolen['id']}/rotate", json={"grace_s": 0}).status_code == 201
    assert slow.finish() == (401, "invalid_api_key")
    assert len(admin.get("/v1/keys").json()["data"]) == before


def test_a_secret_rotated_during_the_body_cannot_generate(admin: httpx.Client) -> None:
    stolen = new_key(admin, "acme", "admin")
    slow = SlowRequest(admin, stolen["secret"], "POST", "/v1/completions", {"model": "fake", "prompt": [1]})
    assert admin.get("/v1/keys").status_code == 200
    assert admin.post(f"/v1/keys/{stolen['id']}/rotate", json={"grace_s": 0}).status_code == 201
    assert slow.finish() == (401, "invalid_api_key")


def test_a_key_demoted_during_the_body_cannot_change_another_key(admin: httpx.Client) -> None:
    key, other = new_key(admin, "acme", "admin"), new_key(admin, "acme", "viewer")
    slow = SlowRequest(admin, key["secret"], "PATCH", f"/v1/keys/{other['id']}", {"role": "admin"})
    assert admin.patch(f"/v1/keys/{key['id']}", json={"role": "viewer"}).status_code == 200
    assert slow.finish() == (403, "forbidden")
    assert admin.get(f"/v1/keys/{other['id']}").json()["role"] == "viewer"


def test_a_key_revoked_before_an_empty_chunked_body_ends_cannot_rotate_another_key(admin: httpx.Client) -> None:
    stolen, other = new_key(admin, "acme", "admin"), new_key(admin, "acme", "admin")
    connection = http.client.HTTPConnection(urlsplit(str(admin.base_url)).netloc, timeout=WAIT_S)
    connection.putrequest("POST", f"/v1/keys/{other['id']}/rotate")
    connection.putheader("x-api-key", stolen["secret"])
    connection.putheader("transfer-encoding", "chunked")
    connection.endheaders()
    assert admin.get("/v1/keys", params={"tenant": "acme"}).status_code == 200
    assert admin.delete(f"/v1/keys/{stolen['id']}").status_code == 204
    connection.send(b"0\r\n\r\n")
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (401, "invalid_api_key")
    connection.close()


def test_an_open_server_that_gets_its_first_key_during_the_body_refuses_the_request(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with serve_fake(data_dir) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as anyone:
        slow = SlowRequest(anyone, None, "POST", "/v1/keys", {"role": "admin", "tenant": "*"})
        assert anyone.get("/v1/keys").status_code == 200
        with client(server, offline_admin_key(data_dir)) as admin:
            wait_until(lambda: anyone.get("/v1/keys").status_code == 401, "the server is closed")
            assert slow.finish() == (401, "invalid_api_key")
            assert len(admin.get("/v1/keys").json()["data"]) == 1
        stop(server)

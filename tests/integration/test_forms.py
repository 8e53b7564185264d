"""Adapters as multipart forms, against their tenant's quota: a form that does not fit is not stored first."""

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from loraserve.api.management.multipart_form import FILES
from tests.support.management import ADAPTER_FILES, add_adapter, client, fake_adapter, new_key, offline_admin_key
from tests.support.server_process import WAIT_S, ServerProcess, serve_fake, stop, wait_until

FORM = "multipart/form-data; boundary=x"
HEAD = b'--x\r\nContent-Disposition: form-data; name="files"; filename="adapter_model.safetensors"\r\n\r\n'


@dataclass(frozen=True, slots=True)
class Keyed:
    server: ServerProcess
    data_dir: Path
    admin: httpx.Client

    def tenant(self, name: str, max_adapter_bytes: int) -> str:
        """Creates a tenant with that limit; returns an operator's key."""
        limits = {"max_adapter_bytes": max_adapter_bytes}
        assert self.admin.post("/v1/tenants", json={"id": name, "limits": limits}).status_code == 201
        return new_key(self.admin, name, "operator")["secret"]

    def begin(self, key: str, **headers: str) -> http.client.HTTPConnection:
        """A form of which only the HTTP headers are sent."""
        connection = http.client.HTTPConnection(urlsplit(self.server.url).netloc, timeout=WAIT_S)
        connection.putrequest("POST", "/v1/adapters")
        for name, value in {"x-api-key": key, "content-type": FORM, **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection

    def stored(self) -> list[Path]:
        return [path for path in (self.data_dir / "spool").glob("*/*") if path.is_file()]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    data_dir = tmp_path_factory.mktemp("forms") / "data"
    key = offline_admin_key(data_dir)
    with serve_fake(data_dir) as server, client(server, key) as admin:
        yield Keyed(server, data_dir, admin)
        stop(server)


def error_of(connection: http.client.HTTPConnection) -> tuple[int, dict[str, Any]]:
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body["error"]


def test_a_form_that_announces_more_than_the_quota_is_refused_before_its_first_byte(keyed: Keyed) -> None:
    key = keyed.tenant("announced", 100_000)
    status, error = error_of(keyed.begin(key, **{"content-length": "50000000"}))
    assert (status, error["code"]) == (429, "insufficient_quota")
    assert "100000 bytes" in error["message"]


def test_a_form_that_announces_more_than_any_adapter_may_have_is_refused_before_its_first_byte(keyed: Keyed) -> None:
    key = new_key(keyed.admin, "default", "operator")["secret"]
    status, error = error_of(keyed.begin(key, **{"content-length": "99999999999999"}))
    assert (status, error["code"]) == (413, "request_too_large")
    assert "99999999999999 bytes" in error["message"]
    assert str(sum(FILES.values())) in error["message"]


def test_a_form_that_announces_no_length_is_cut_off_at_the_quota(keyed: Keyed) -> None:
    key = keyed.tenant("unannounced", 100_000)
    connection = keyed.begin(key, **{"transfer-encoding": "chunked"})
    for piece in (HEAD, bytes(60_000), bytes(60_000)):
        connection.send(b"%x\r\n%s\r\n" % (len(piece), piece))
    status, error = error_of(connection)
    assert (status, error["code"]) == (429, "insufficient_quota")
    assert keyed.stored() == []


def test_a_form_being_received_counts_against_its_tenants_quota(keyed: Keyed) -> None:
    key = keyed.tenant("busy", 10_000_000)
    connection = keyed.begin(key, **{"content-length": "9000000"})
    connection.send(HEAD)
    wait_until(lambda: keyed.stored() != [], "the form is being received")
    assert error_of(keyed.begin(key, **{"content-length": "5000000"}))[1]["code"] == "insufficient_quota"
    connection.close()


def test_a_form_that_fits_the_quota_to_the_byte_is_accepted(keyed: Keyed, tmp_path: Path) -> None:
    folder = fake_adapter(tmp_path / "skill", 1)
    size_bytes = sum((folder / name).stat().st_size for name in ADAPTER_FILES)
    with client(keyed.server, keyed.tenant("exact", size_bytes)) as http:
        assert add_adapter(http, "skill", folder)["state"] == "ready"
    files = [("files", (name, (folder / name).read_bytes())) for name in ADAPTER_FILES]
    with client(keyed.server, keyed.tenant("short", size_bytes - 1)) as http:
        refused = http.post("/v1/adapters", data={"name": "skill"}, files=files)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


def test_a_form_whose_key_is_revoked_before_its_last_byte_publishes_nothing(keyed: Keyed, tmp_path: Path) -> None:
    keyed.tenant("robbed", 10_000_000)
    stolen = new_key(keyed.admin, "robbed", "operator")
    folder = fake_adapter(tmp_path / "evil", 1)
    form = httpx.Request(
        "POST",
        keyed.server.url,
        data={"name": "sql"},
        files=[("files", (name, (folder / name).read_bytes())) for name in ADAPTER_FILES],
    )
    body = form.read()
    connection = keyed.begin(
        stolen["secret"], **{"content-type": form.headers["content-type"], "content-length": str(len(body))}
    )
    connection.send(body[:-10])
    wait_until(lambda: keyed.stored() != [], "the form is being received")
    assert keyed.admin.delete(f"/v1/keys/{stolen['id']}").status_code == 204
    connection.send(body[-10:])
    status, error = error_of(connection)
    assert (status, error["code"]) == (401, "invalid_api_key")
    headers = {"x-tenant": "robbed"}
    assert keyed.admin.get("/v1/adapters/sql", headers=headers).status_code == 404
    assert keyed.admin.get("/v1/uploads", headers=headers).json()["data"] == []

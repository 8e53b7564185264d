"""A data directory that is older than Redis: a restored backup, or a disk that lags behind other servers' writes."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from loraserve.control.tenancy.api_keys import generate_key
from loraserve.control.tenancy.key_documents import rotated
from loraserve.live.key_names import DEFAULT_PREFIX, KeyNames
from loraserve.store.documents import DocumentStore
from loraserve.store.records import DocumentKind, KeyDoc
from tests.support.management import add_adapter, client, complete, fake_adapter, new_key, offline_admin_key
from tests.support.server_process import WAIT_S, ServerProcess, serve_fake, wait_until
from tests.support.valkey import Valkey, running_valkey

CHANGES = ("revoked", "demoted", "rotated", "tenant suspended")


@dataclass(frozen=True, slots=True)
class OlderCopy:
    """A server on a copy of `data` from before its keys were changed, each as its name in `CHANGES` says."""

    server: ServerProcess
    valkey: Valkey
    admin: httpx.Client
    """Its key was not changed."""
    keys: dict[str, dict[str, Any]]
    sessions: dict[str, str]
    """Console cookies from before the changes."""


@pytest.fixture
def older(tmp_path: Path) -> Iterator[OlderCopy]:
    data_dir, copy = tmp_path / "data", tmp_path / "copy"
    admin_key = offline_admin_key(data_dir)
    with running_valkey(tmp_path) as valkey:
        options = ("--redis-url", valkey.url)
        with serve_fake(data_dir, *options) as server, client(server, admin_key) as admin:
            for tenant in ("acme", "globex"):
                assert admin.post("/v1/tenants", json={"id": tenant}).status_code == 201
            keys = {
                change: new_key(admin, "globex" if change == "tenant suspended" else "acme", "admin")
                for change in CHANGES
            }
            sessions = {change: cookie_of(server, key) for change, key in keys.items()}
            shutil.copytree(data_dir, copy)
            for answered in (
                admin.delete(f"/v1/keys/{keys['revoked']['id']}"),
                admin.patch(f"/v1/keys/{keys['demoted']['id']}", json={"role": "viewer"}),
                admin.post(f"/v1/keys/{keys['rotated']['id']}/rotate", json={"grace_s": 0}),
                admin.patch("/v1/tenants/globex", json={"status": "suspended"}),
            ):
                assert answered.is_success, answered.text
        with serve_fake(copy, *options) as server, client(server, admin_key) as admin:
            yield OlderCopy(server, valkey, admin, keys, sessions)


def cookie_of(server: ServerProcess, key: dict[str, Any]) -> str:
    """The token in the session cookie."""
    answered = httpx.post(f"{server.url}/v1/session", json={"key": key["secret"]}, timeout=WAIT_S)
    assert answered.status_code == 200, answered.text
    return next(iter(answered.cookies.values()))


def code_of(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, None if response.is_success else response.json()["error"]["code"]


def answers(http: httpx.Client) -> list[httpx.Response]:
    """Responses to requests that a tenant's admin may send."""
    return [
        http.get("/v1/keys"),
        http.post("/v1/keys", json={"role": "admin"}),
        http.get("/v1/session"),
        http.post("/v1/session/links", json={}),
        http.get("/v1/adapters"),
        http.post("/tokenize", json={"prompt": "a"}),
        complete(http, "fake"),
    ]


def num_keys(admin: httpx.Client) -> int:
    return len(admin.get("/v1/keys").json()["data"])


def test_keys_with_newer_revisions_in_redis_are_refused_and_others_are_not(older: OlderCopy) -> None:
    before = num_keys(older.admin)
    for change, key in older.keys.items():
        cookie = {"cookie": f"ls_session_{older.server.url.rpartition(':')[2]}={older.sessions[change]}"}
        shown = httpx.get(f"{older.server.url}/v1/keys", headers=cookie, timeout=WAIT_S)
        assert code_of(shown) == (503, "service_unavailable"), change
        with client(older.server, key["secret"]) as http:
            assert {code_of(answer) for answer in answers(http)} == {(503, "service_unavailable")}, change
            login = http.post("/v1/session", json={"key": key["secret"]})
            assert code_of(login) == (503, "service_unavailable"), change
    assert num_keys(older.admin) == before
    assert {answer.status_code for answer in answers(older.admin)} == {200, 201}


def test_a_refused_caller_cannot_learn_which_adapters_exist(older: OlderCopy, tmp_path: Path) -> None:
    with client(older.server, new_key(older.admin, "acme", "admin")["secret"]) as http:
        add_adapter(http, "sql", fake_adapter(tmp_path / "sql", 1))
    with client(older.server, older.keys["revoked"]["secret"]) as http:
        refused = [
            complete(http, "sql"),
            complete(http, "other"),
            complete(http, "sql", max_tokens=-1),
            http.post("/v1/completions", content=b"{"),
            http.get("/v1/responses/resp_1"),
        ]
    assert {code_of(answer) for answer in refused} == {(503, "service_unavailable")}


def test_a_refused_session_can_log_out(older: OlderCopy) -> None:
    key, names = new_key(older.admin, "acme", "admin"), KeyNames(DEFAULT_PREFIX)
    with httpx.Client(base_url=older.server.url, timeout=WAIT_S) as browser:
        csrf = browser.post("/v1/session", json={"key": key["secret"]}).json()["csrf"]
        older.valkey.command("HSET", names.document("key", key["id"]), "rev", "2")
        assert code_of(browser.get("/v1/session")) == (503, "service_unavailable")
        left = browser.delete("/v1/session", headers={"x-csrf-token": csrf, "origin": older.server.url})
        assert left.status_code == 204, left.text
        assert not browser.cookies


def test_a_key_stays_refused_while_redis_is_gone_until_an_empty_redis_returns(older: OlderCopy) -> None:
    with client(older.server, older.keys["revoked"]["secret"]) as http:
        older.valkey.kill()
        assert older.admin.get("/v1/keys").status_code == 200
        assert code_of(http.get("/v1/keys")) == (503, "service_unavailable")
        older.valkey.start()
        wait_until(lambda: http.get("/v1/keys").status_code == 200, "an empty Redis is filled from the copy")
        assert complete(http, "fake").status_code == 200


def test_a_key_change_that_reaches_redis_during_a_slow_body_refuses_the_request(older: OlderCopy) -> None:
    key = new_key(older.admin, "acme", "admin")
    before, names = num_keys(older.admin), KeyNames(DEFAULT_PREFIX)

    def body() -> Iterator[bytes]:
        yield b'{"role": "admin"'
        assert older.admin.get("/v1/keys").status_code == 200
        # Without the change notification that wakes the server, and with no other request.
        older.valkey.command("HSET", names.document("key", key["id"]), "rev", "2")
        yield b"}"

    with client(older.server, key["secret"]) as http:
        made = http.post("/v1/keys", content=body(), headers={"content-type": "application/json"})
    assert code_of(made) == (503, "service_unavailable")
    assert num_keys(older.admin) == before


def test_a_rotated_secret_is_refused_at_once_without_a_notification(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    admin_key = offline_admin_key(data_dir)
    with running_valkey(tmp_path) as valkey, serve_fake(data_dir, "--redis-url", valkey.url) as server:
        with client(server, admin_key) as admin:
            key = new_key(admin, "default", "admin")
        documents = DocumentStore(data_dir)
        document = documents.get(DocumentKind.KEY, key["id"])
        assert document is not None
        assert isinstance(document.doc, KeyDoc)
        doc = rotated(document.doc, generate_key(document.id), 0, time.time())
        documents.commit(replace(document, rev=2, doc=doc))
        # As another server writes it, but without the change notification that wakes this one.
        valkey.command("HSET", KeyNames(DEFAULT_PREFIX).document("key", document.id), "rev", "2")
        with client(server, key["secret"]) as http:
            assert code_of(http.post("/v1/session", json={"key": key["secret"]})) == (401, "invalid_api_key")
            assert code_of(http.get("/v1/keys")) == (401, "invalid_api_key")

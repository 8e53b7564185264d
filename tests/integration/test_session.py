"""Logging in to the console of a server with keys, as a browser does it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraserve.control.tenancy.login_attempts import LOGINS_WINDOW_S, MAX_LOGINS
from tests.support.management import client, new_key, offline_admin_key
from tests.support.server_process import WAIT_S, ServerProcess, run_command, serve_fake, stop, wait_until

LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/ui/#/login/([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class Keyed:
    server: ServerProcess
    data_dir: Path
    admin_key: str
    admin: httpx.Client


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    data_dir = tmp_path_factory.mktemp("session") / "data"
    key = offline_admin_key(data_dir)
    with serve_fake(data_dir) as server, client(server, key) as admin:
        yield Keyed(server, data_dir, key, admin)
        stop(server)


@pytest.fixture
def browser(keyed: Keyed) -> Iterator[httpx.Client]:
    """Keeps cookies and sends its origin."""
    with httpx.Client(base_url=keyed.server.url, headers={"origin": keyed.server.url}, timeout=WAIT_S) as http:
        yield http


def log_in(browser: httpx.Client, **body: str) -> str:
    """The CSRF token."""
    answered = browser.post("/v1/session", json=body)
    assert answered.status_code == 200, answered.text
    return answered.json()["csrf"]


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(keyed: Keyed, browser: httpx.Client) -> None:
    answered = browser.post("/v1/session", json={"key": keyed.admin_key})
    cookie = answered.headers["set-cookie"].lower()
    port = keyed.server.url.rpartition(":")[2]
    assert cookie.startswith(f"ls_session_{port}=")
    for flag in ("httponly", "samesite=strict", "path=/", "max-age=43200"):
        assert flag in cookie
    assert "secure" not in cookie
    assert keyed.admin_key not in answered.text
    session = browser.get("/v1/session").json()
    assert (session["open"], session["role"], session["tenant"]) == (False, "admin", "*")
    assert session["csrf"] == answered.json()["csrf"]
    assert session["expires_at"] is not None


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_the_servers_address_redirects_to_the_console(browser: httpx.Client, path: str) -> None:
    moved = browser.get(path)
    assert (moved.status_code, moved.headers["location"]) == (307, "ui/")
    assert browser.head(path).headers["location"] == "ui/"
    page = browser.get(path, follow_redirects=True)
    assert page.url.path == "/ui/"
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>" in page.text


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nothing_is_changed_without_the_sessions_csrf_token(keyed: Keyed, browser: httpx.Client, method: str) -> None:
    csrf = log_in(browser, key=keyed.admin_key)
    path = {"POST": "/v1/keys", "PUT": "/v1/adapters/x/aliases/live"}.get(method, "/v1/adapters/x")
    for headers in ({}, {"x-csrf-token": "wrong"}, {"x-csrf-token": csrf, "origin": "http://evil.example"}):
        refused = browser.request(method, path, json={"role": "viewer"}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    allowed = browser.request(method, path, json={"role": "viewer"}, headers={"x-csrf-token": csrf})
    assert allowed.status_code != 403


def test_a_page_of_another_origin_cannot_log_a_user_in(keyed: Keyed, browser: httpx.Client) -> None:
    refused = browser.post("/v1/session", json={"key": keyed.admin_key}, headers={"origin": "http://evil.example"})
    assert refused.status_code == 403
    assert "set-cookie" not in refused.headers


def test_logging_out_needs_the_csrf_token_and_ends_the_session(keyed: Keyed, browser: httpx.Client) -> None:
    csrf = log_in(browser, key=keyed.admin_key)
    stolen = dict(browser.cookies)
    assert browser.delete("/v1/session").status_code == 403
    ended = browser.delete("/v1/session", headers={"x-csrf-token": csrf})
    assert ended.status_code == 204
    assert "max-age=0" in ended.headers["set-cookie"].lower()
    with httpx.Client(base_url=keyed.server.url, cookies=stolen, timeout=WAIT_S) as thief:
        assert thief.get("/v1/session").status_code == 401


def test_a_session_ends_with_its_key(keyed: Keyed, browser: httpx.Client) -> None:
    key = new_key(keyed.admin, "default", "viewer")
    log_in(browser, key=key["secret"])
    assert browser.get("/v1/live").status_code == 200
    assert keyed.admin.delete(f"/v1/keys/{key['id']}").status_code == 204
    assert browser.get("/v1/live").status_code == 401


def test_a_session_ends_with_the_secret_that_opened_it(keyed: Keyed, browser: httpx.Client) -> None:
    key = new_key(keyed.admin, "default", "viewer")
    log_in(browser, key=key["secret"])
    command = ("ui", "login", "--data-dir", str(keyed.data_dir), "--print", "--key-id", key["id"])
    before = LINK.fullmatch(run_command(*command).stdout.strip())
    assert before is not None
    rotated = keyed.admin.post(f"/v1/keys/{key['id']}/rotate", json={"grace_s": 0}).json()
    assert browser.get("/v1/live").status_code == 401
    assert browser.post("/v1/session", json={"token": before[2]}).status_code == 401
    log_in(browser, key=rotated["secret"])
    assert browser.get("/v1/live").status_code == 200
    after = LINK.fullmatch(run_command(*command).stdout.strip())
    assert after is not None
    log_in(browser, token=after[2])
    assert browser.get("/v1/live").status_code == 200


def test_a_link_from_the_data_directory_logs_in_once(keyed: Keyed, browser: httpx.Client) -> None:
    refused = run_command("ui", "login", "--data-dir", str(keyed.data_dir))
    assert refused.returncode == 1
    assert "--print" in refused.stderr
    printed = run_command("ui", "login", "--data-dir", str(keyed.data_dir), "--print")
    assert printed.returncode == 0, printed.stderr
    found = LINK.fullmatch(printed.stdout.strip())
    assert found is not None
    assert found[1] == keyed.server.url
    log_in(browser, token=found[2])
    assert browser.post("/v1/session", json={"token": found[2]}).status_code == 401


def test_an_admin_can_make_login_links_only_for_keys_it_sees(keyed: Keyed, browser: httpx.Client) -> None:
    viewer = new_key(keyed.admin, "default", "viewer")
    command = ("ui", "login", "--url", keyed.server.url, "--api-key", keyed.admin_key, "--print")
    printed = run_command(*command, "--key-id", viewer["id"])
    found = LINK.fullmatch(printed.stdout.strip())
    assert found is not None, printed.stderr
    log_in(browser, token=found[2])
    assert browser.get("/v1/session").json()["role"] == "viewer"
    for role in ("infer", "admin"):
        other = new_key(keyed.admin, "default", role)
        with client(keyed.server, new_key(keyed.admin, "shared", "admin")["secret"]) as elsewhere:
            foreign = elsewhere.post("/v1/session/links", json={"key_id": other["id"]})
            missing = elsewhere.post("/v1/session/links", json={"key_id": "abcdefgh"})
            assert (foreign.status_code, missing.status_code) == (404, 404)
    infer = new_key(keyed.admin, "default", "infer")
    assert keyed.admin.post("/v1/session/links", json={"key_id": infer["id"]}).status_code == 403


def test_a_login_link_cannot_grant_more_than_its_creators_key(keyed: Keyed) -> None:
    """A link for a key that may use every adapter would make a limited admin an admin of the whole tenant."""
    own, narrow, wide = (
        new_key(keyed.admin, "default", "admin", adapters=adapters) for adapters in (["sql", "chat"], ["sql"], None)
    )
    with client(keyed.server, own["secret"]) as limited:
        codes = {
            key["id"]: limited.post("/v1/session/links", json={"key_id": key["id"]}).status_code
            for key in (own, narrow, wide)
        }
    assert codes == {own["id"]: 201, narrow["id"]: 201, wide["id"]: 403}


def test_a_key_with_too_many_logins_is_rate_limited_and_its_oldest_sessions_end(
    keyed: Keyed, browser: httpx.Client
) -> None:
    key = new_key(keyed.admin, "default", "viewer")["secret"]
    log_in(browser, key=key)
    first = dict(browser.cookies)
    for _ in range(MAX_LOGINS - 1):
        log_in(browser, key=key)
    refused = browser.post("/v1/session", json={"key": key})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(refused.headers["retry-after"]) <= LOGINS_WINDOW_S
    assert browser.get("/v1/session").status_code == 200
    with httpx.Client(base_url=keyed.server.url, cookies=first, timeout=WAIT_S) as of_first:
        assert of_first.get("/v1/session").status_code == 401
    log_in(browser, key=keyed.admin_key)


def test_logins_and_refusals_are_in_the_audit_trail(keyed: Keyed, browser: httpx.Client) -> None:
    log_in(browser, key=keyed.admin_key)
    # An address that no other test uses: the same refusal is recorded once a minute.
    elsewhere = {"x-forwarded-for": "192.0.2.7"}
    assert browser.post("/v1/session", json={"key": "ls-aaaaaaaa_nope"}, headers=elsewhere).status_code == 401

    def newest() -> list[dict[str, Any]]:
        return keyed.admin.get("/v1/audit", params={"kind": "session", "limit": 2}).json()["data"]

    wait_until(lambda: newest()[0]["detail"] == "192.0.2.7: invalid_api_key", "the refusal in the audit trail")
    found = newest()
    assert [(act["action"], act["outcome"]) for act in found] == [
        ("session.refused", "refused"),
        ("session.login", "done"),
    ]
    assert "nope" not in repr(found)


def test_login_guesses_are_rate_limited(tmp_path: Path) -> None:
    """On its own server: for a minute afterwards, failed logins from this address would get 429."""
    key = offline_admin_key(tmp_path / "data")
    with serve_fake(tmp_path / "data") as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        codes = [http.post("/v1/session", json={"token": "guess"}).status_code for _ in range(12)]
        assert codes == [401] * 10 + [429] * 2
        wrong = http.post("/v1/session", json={"key": "ls-aaaaaaaa_nope"})
        assert wrong.status_code == 429
        assert 0 < int(wrong.headers["retry-after"]) <= 60
        # Other users behind the same proxy share this address.
        assert http.post("/v1/session", json={"key": key}).status_code == 200


def test_an_open_server_needs_no_login_and_ignores_old_cookies(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "data") as server:
        port = server.url.rpartition(":")[2]
        with httpx.Client(base_url=server.url, cookies={f"ls_session_{port}": "old"}, timeout=WAIT_S) as http:
            session = http.get("/v1/session").json()
            assert (session["open"], session["role"], session["csrf"]) == (True, "admin", "")
            refused = http.post("/v1/session", json={"key": "ls-aaaaaaaa_nope"})
            assert refused.status_code == 400
        printed = run_command("ui", "login", "--url", server.url, "--print")
        assert printed.stdout.strip() == f"{server.url}/ui/"

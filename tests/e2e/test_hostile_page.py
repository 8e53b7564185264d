"""A web page of another site, in a real browser, against a server that needs no key: it changes and learns nothing.

The page tries everything a page can: fetch with and without CORS, forms of every encoding, beacons, images, frames.
"""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.management import add_adapter, fake_adapter
from tests.support.server_process import ServerProcess, serve_fake, stop

CHROMIUM = Path("/usr/bin/chromium")
playwright_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")

PAGE = b"<!doctype html><meta charset=utf-8><title>another site</title><body></body>"

TRY_FETCH = """
async ([url, method, mode, type, body]) => {
  const form = () => { const data = new FormData(); data.append('name', 'evil');
    data.append('files', new Blob(['{}']), 'adapter_config.json');
    data.append('files', new Blob(['xx']), 'adapter_model.safetensors'); return data; };
  const headers = type && type !== 'form' ? {'content-type': type} : {};
  const options = {method, mode, credentials: 'include', headers};
  if (method !== 'GET' && method !== 'HEAD') options.body = type === 'form' ? form() : body;
  try {
    const answer = await fetch(url, options);
    return {kind: answer.type, status: answer.status, text: await answer.text()};
  } catch (error) { return {kind: 'blocked', status: 0, text: ''}; }
}
"""
SUBMIT_FORM = """
([url, enctype]) => new Promise(done => {
  const frame = document.createElement('iframe'); frame.name = 'target'; document.body.append(frame);
  const form = document.createElement('form'); form.method = 'POST'; form.action = url; form.enctype = enctype;
  form.target = 'target';
  const field = document.createElement('input'); field.name = '{"id": "evil", "description": "'; field.value = '"}';
  const name = document.createElement('input'); name.name = 'name'; name.value = 'evil';
  form.append(field, name); document.body.append(form);
  frame.onload = () => { let text = null; try { text = frame.contentDocument.body.innerText; } catch (error) {}
    frame.remove(); form.remove(); done(text); };
  form.submit();
})
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server without keys, with an adapter to steal or damage."""
    folder = tmp_path_factory.mktemp("open")
    with serve_fake(folder / "data") as server:
        with httpx.Client(base_url=server.url, timeout=60) as admin:
            add_adapter(admin, "treasure", fake_adapter(folder / "adapter", 1))
        yield server
        stop(server)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM),
            args=[
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--host-resolver-rules=MAP rebound.example 127.0.0.1,MAP evil.example 127.0.0.1",
                # Otherwise Chromium itself asks the user before a public page may reach this machine.
                "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests",
            ],
        )
        yield browser
        browser.close()


@contextmanager
def other_site() -> Iterator[int]:
    """The port of a site that answers every path with the same page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    try:
        yield site.server_address[1]
    finally:
        site.shutdown()
        thread.join()
        site.server_close()


@pytest.fixture(scope="module", params=["evil.example", "127.0.0.1", "localhost"])
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """A page of another site, or of another port of the same machine, which browsers call the same site."""
    with other_site() as port:
        page = browser.new_page()
        page.goto(f"http://{request.param}:{port}/")
        yield page
        page.close()


def state(server: ServerProcess) -> dict[str, Any]:
    """Everything that a page might have changed."""
    with httpx.Client(base_url=server.url, timeout=60) as admin:
        adapters = [(item["name"], item["rev"]) for item in admin.get("/v1/adapters").json()["data"]]
        tenants = [(item["id"], item["rev"]) for item in admin.get("/v1/tenants").json()["data"]]
        keys = admin.get("/v1/keys").json()["data"]
        uploads = len(admin.get("/v1/uploads").json()["data"])
        usage = sum(row["num_requests"] for row in admin.get("/v1/usage").json()["data"])
    return {"adapters": adapters, "tenants": tenants, "keys": keys, "uploads": uploads, "requests": usage}


COMPLETION = json.dumps({"model": "treasure", "prompt": "secret", "max_tokens": 2})
TENANT = json.dumps({"id": "evil"})
KEY = json.dumps({"role": "admin", "tenant": "*"})
ATTEMPTS = [
    ("GET", "/v1/adapters", None, None),
    ("GET", "/v1/models", None, None),
    ("GET", "/metrics", None, None),
    ("GET", "/v1/adapters/treasure/versions/1/files/adapter_config.json", None, None),
    ("GET", "/v1/session", None, None),
    ("POST", "/v1/completions", "application/json", COMPLETION),
    ("POST", "/v1/completions", "text/plain", COMPLETION),
    ("POST", "/generate", "text/plain", json.dumps({"inputs": "x"})),
    ("POST", "/v1/tenants", "application/json", TENANT),
    ("POST", "/v1/tenants", "text/plain", TENANT),
    ("POST", "/v1/tenants", "application/x-www-form-urlencoded", TENANT),
    ("POST", "/v1/keys", "text/plain", KEY),
    ("POST", "/v1/session", "text/plain", "{}"),
    ("POST", "/v1/adapters", "form", None),
    ("POST", "/v1/load_lora_adapter", "text/plain", json.dumps({"lora_name": "evil", "lora_path": "/tmp"})),
    ("POST", "/v1/unload_lora_adapter", "text/plain", json.dumps({"lora_name": "treasure"})),
    ("POST", "/v1/adapters/treasure/rollback", "text/plain", "{}"),
    ("POST", "/v1/adapters/treasure/restore", "text/plain", ""),
    ("PUT", "/v1/adapters/treasure/aliases/live", "application/json", json.dumps({"version": 1})),
    ("PUT", "/v1/adapters/treasure/residency", "text/plain", json.dumps({"tier": "device"})),
    ("PATCH", "/v1/adapters/treasure", "application/json", json.dumps({"enabled": False})),
    ("DELETE", "/v1/adapters/treasure", None, None),
]


@pytest.mark.parametrize("mode", ["cors", "no-cors"])
def test_fetches_change_and_read_nothing(server: ServerProcess, page: Any, mode: str) -> None:
    before = state(server)
    for method, path, content_type, body in ATTEMPTS:
        for host in ("127.0.0.1", "localhost"):
            url = server.url.replace("127.0.0.1", host) + path
            answer = page.evaluate(TRY_FETCH, [url, method, mode, content_type, body])
            assert (answer["kind"] in ("blocked", "opaque"), answer["text"]) == (True, ""), (method, path)
    assert state(server) == before


@pytest.mark.parametrize("enctype", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_forms_change_and_show_nothing(server: ServerProcess, page: Any, enctype: str) -> None:
    before = state(server)
    for path in ("/v1/tenants", "/v1/adapters", "/v1/keys", "/v1/completions", "/v1/unload_lora_adapter"):
        assert page.evaluate(SUBMIT_FORM, [f"{server.url}{path}", enctype]) is None
    assert state(server) == before


def test_beacons_images_and_frames_change_and_show_nothing(server: ServerProcess, page: Any) -> None:
    before = state(server)
    for path in ("/v1/tenants", "/v1/keys", "/v1/adapters/treasure/rollback"):
        page.evaluate("([url, body]) => navigator.sendBeacon(url, body)", [f"{server.url}{path}", TENANT])
    seen = page.evaluate(
        """url => new Promise(done => { const image = new Image(); image.onload = () => done('loaded');
             image.onerror = () => done('failed'); image.src = url; })""",
        f"{server.url}/v1/adapters",
    )
    assert seen == "failed"
    assert state(server) == before


def test_a_host_name_rebound_to_this_machine_is_refused(server: ServerProcess, browser: Any) -> None:
    """The browser takes the server for the attacker's own site, so nothing is cross-origin: only the Host differs."""
    port = server.url.rpartition(":")[2]
    before = state(server)
    page = browser.new_page()
    page.goto(f"http://rebound.example:{port}/health")
    for method, path, content_type, body in ATTEMPTS:
        url = f"http://rebound.example:{port}{path}"
        answer = page.evaluate(TRY_FETCH, [url, method, "cors", content_type, body])
        assert (answer["kind"], answer["status"]) == ("basic", 403), (method, path)
        assert json.loads(answer["text"])["error"]["code"] == "forbidden" if path != "/generate" else True
    page.close()
    assert state(server) == before


def test_the_same_page_succeeds_from_an_allowed_origin(tmp_path: Path, browser: Any) -> None:
    """Shows that the attempts above fail because of the origin."""
    with other_site() as port, serve_fake(tmp_path, "--allowed-origins", f"http://evil.example:{port}") as server:
        page = browser.new_page()
        page.goto(f"http://evil.example:{port}/")
        fetch = TRY_FETCH.replace("'include'", "'omit'")
        created = page.evaluate(fetch, [f"{server.url}/v1/tenants", "POST", "cors", "application/json", TENANT])
        assert (created["kind"], created["status"], json.loads(created["text"])["id"]) == ("cors", 201, "evil")
        read = page.evaluate(fetch, [f"{server.url}/v1/models", "GET", "cors", None, None])
        assert (read["status"], json.loads(read["text"])["data"][0]["id"]) == (200, "fake")
        page.close()
        assert "evil" in [name for name, _ in state(server)["tenants"]]
        stop(server)

"""What a view shows without an answer, with an outdated one or without permission, and where settings came from."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser.conftest import NewConsole, watched_console
from tests.browser.console import Console
from tests.browser.tenant import Tenant
from tests.support.server_process import serve_fake, stop

POLLED_MS = 15_000
"""Time after which every view polls again by itself."""
FAILING = {
    "adapters": "**/v1/adapters?*",
    "requests": "**/v1/requests?*",
    "live": "**/v1/live",
    "access/keys": "**/v1/keys?*",
    "requests/audit": "**/v1/audit?*",
    "requests/usage": "**/v1/usage?*",
    "settings": "**/v1/config",
}
KEEPS_NOTHING = """
for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, name, {
    get() {
      throw new DOMException("Access is denied for this document.", "SecurityError");
    },
  });
}
"""
PLANTED = {"error": {"message": "Redis is being read again.", "code": "unavailable", "type": "server_error"}}


@contextmanager
def cutting_server(headers: str) -> Iterator[str]:
    """Answers with a head and the beginning of the body, then closes the connection."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65_536)
                connection.sendall(
                    f"HTTP/1.1 200 OK\r\n{headers}\r\ncontent-length: 1000\r\n\r\n".encode() + b"data: {"
                )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def fail(route: Route) -> None:
    headers = {"x-request-id": "planted-id"}
    route.fulfill(status=503, headers=headers, content_type="application/json", body=json.dumps(PLANTED))


@pytest.fixture
def of_admin(new_console: NewConsole, tenant: Tenant) -> Console:
    console = new_console()
    console.start_session(tenant.key("admin"))
    console.watch.expect_status(503)
    return console


def see_failure(page: Page) -> None:
    failure = page.get_by_test_id("failure").first
    expect(failure).to_contain_text("Redis is being read again.")
    expect(failure).to_contain_text("planted-id")


@pytest.mark.parametrize(("view", "path"), FAILING.items(), ids=list(FAILING))
def test_a_failure_shows_its_reason_and_request_id_and_can_be_retried(
    new_console: NewConsole, tenant: Tenant, admin_secret: str, view: str, path: str
):
    console = new_console()
    console.start_session(admin_secret if view == "settings" else tenant.key("admin"))
    console.watch.expect_status(503)
    page = console.page
    page.route(path, fail)
    page.goto(f"{console.url}/ui/#/{view}")
    see_failure(page)
    console.let_through(path)
    page.get_by_role("button", name="Try again").first.click()
    expect(page.get_by_test_id("failure")).to_have_count(0)


def test_a_response_cut_off_after_its_head_is_shown_as_a_lost_connection(of_admin: Console):
    of_admin.watch.expect_no_answer()
    page = of_admin.page
    with cutting_server("content-type: application/json") as url:
        page.route(FAILING["live"], lambda route: route.continue_(url=f"{url}/v1/live"))
        page.goto(f"{of_admin.url}/ui/#/live")
        failure = page.get_by_test_id("failure")
        expect(failure).to_contain_text(
            "The server is not responding. It may be restarting; this page retries automatically."
        )
        expect(failure).not_to_contain_text("TypeError")
        of_admin.let_through(FAILING["live"])
        expect(failure).to_have_count(0)


def test_a_stream_cut_off_after_its_head_is_reported_as_incomplete(new_console: NewConsole, tenant: Tenant):
    console = new_console()
    console.start_session(tenant.operator_key)
    console.watch.expect_no_answer()
    page = console.open("#/playground")
    with cutting_server("content-type: text/event-stream") as url:
        page.route("**/v1/chat/completions", lambda route: route.continue_(url=f"{url}/v1/chat/completions"))
        page.get_by_test_id("prompt").fill("hello")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_test_id("column-0").get_by_role("alert")).to_have_text(
            "The stream ended before the answer was complete."
        )
        console.let_through("**/v1/chat/completions")


def test_a_download_cut_off_after_its_head_is_shown_as_a_lost_connection(of_admin: Console):
    of_admin.watch.expect_no_answer()
    page = of_admin.open("#/requests/audit")
    with cutting_server("content-type: text/csv") as url:
        page.route("**/v1/audit?format=csv", lambda route: route.continue_(url=f"{url}/v1/audit"))
        page.get_by_role("button", name="Export CSV").click()
        of_admin.toast("The server is not responding.")
        of_admin.let_through("**/v1/audit?format=csv")


@pytest.mark.parametrize("view", ["requests", "live", "access/keys"])
def test_stale_data_stays_readable_with_its_age_until_it_is_refreshed(of_admin: Console, view: str):
    of_admin.page.clock.install()
    page = of_admin.open(f"#/{view}")
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_be_visible()
    page.route(FAILING[view], fail)
    stale = page.get_by_test_id("stale")
    page.clock.fast_forward(POLLED_MS)
    # A view that is just waiting for an answer polls again only after it.
    expect(stale).to_contain_text("Redis is being read again.")
    expect(stale).to_contain_text("Last updated")
    expect(page.get_by_test_id("failure")).to_have_count(0)
    of_admin.let_through(FAILING[view])
    page.clock.fast_forward(POLLED_MS)
    expect(stale).to_have_count(0)


@pytest.mark.parametrize("view", ["upload", "playground", "access", "settings"])
def test_a_view_that_requires_a_higher_role_names_it(new_console: NewConsole, tenant: Tenant, view: str):
    console = new_console()
    console.start_session(tenant.key("viewer"))
    page = console.open(f"#/{view}")
    role = "operator" if view in ("upload", "playground") else "admin"
    expect(page.get_by_test_id("no-permission")).to_contain_text(f"requires the {role} role")


def test_a_skeleton_is_shown_until_the_first_answer(of_admin: Console):
    page = of_admin.page
    held: list[Route] = []
    page.route("**/v1/keys?*", lambda route: held.append(route))
    with page.expect_request("**/v1/keys?*"):
        page.goto(f"{of_admin.url}/ui/#/access/keys")
    expect(page.get_by_test_id("loading")).to_be_visible()
    expect(page.locator(".skeleton").first).to_be_visible()
    held[0].continue_()
    expect(page.get_by_test_id("key-row").first).to_be_visible()
    expect(page.get_by_test_id("loading")).to_have_count(0)


def test_settings_show_every_value_with_its_source(new_console: NewConsole, admin_secret: str):
    console = new_console()
    console.start_session(admin_secret)
    page = console.open("#/settings")
    rows = page.get_by_test_id("setting")
    expect(rows.filter(has_text="--num-threads")).to_contain_text("flag")
    expect(rows.filter(has_text="--max-num-seqs")).to_contain_text("default")
    num_all = rows.count()
    page.get_by_role("button", name="Non-default").click()
    expect(rows.filter(has_text="--max-num-seqs")).to_have_count(0)
    assert 0 < rows.count() < num_all
    page.get_by_label("Search settings").fill("num-threads")
    expect(rows).to_have_count(1)
    expect(page).to_have_url(f"{console.url}/ui/#/settings?shown=set&q=num-threads")
    page.get_by_label("Search settings").fill("no-such-setting")
    expect(page.get_by_test_id("empty")).to_contain_text("loraserve serve --help")


def test_the_console_of_an_open_server_works_in_a_browser_that_blocks_storage(browser: Browser, tmp_path: Path):
    with serve_fake(tmp_path / "data") as server:
        with watched_console(browser, server.url, 1280, 800, "dark") as console:
            # As with all cookies blocked.
            console.page.add_init_script(KEEPS_NOTHING)
            page = console.open("#/adapters")
            page.get_by_role("button", name="Use the light theme").click()
            expect(page.locator("html")).to_have_attribute("data-theme", "light")
            page.get_by_label("Tenant").select_option("shared")
            expect(page.get_by_label("Tenant")).to_have_value("shared")
        stop(server)


def test_the_bottom_bar_on_a_phone_reaches_the_views_under_more(new_console: NewConsole, admin_secret: str):
    console = new_console(width=390, height=844)
    console.start_session(admin_secret)
    page = console.open()
    for title in ("Requests", "Tenants & keys", "Settings", "Live"):
        page.get_by_role("button", name="More", exact=True).click()
        page.get_by_role("option", name=title).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Tenants" if title == "Tenants & keys" else title)


@pytest.mark.parametrize(
    ("redis", "told"),
    [
        ("full", "requests are served, but no changes can be made"),
        ("grace", "known keys are served for a short while"),
        ("gone", "requests are refused until it is back"),
    ],
)
def test_the_overview_explains_the_effect_of_redis_problems(of_admin: Console, redis: str, told: str):
    def answer(route: Route) -> None:
        found = route.fetch()
        route.fulfill(response=found, json={**found.json(), "redis": redis})

    of_admin.page.route(FAILING["live"], answer)
    page = of_admin.open()
    expect(page.get_by_role("alert").filter(has_text="Redis is")).to_contain_text(told)

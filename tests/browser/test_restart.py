"""A server that stops and restarts while a page is open."""

from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Request, Route, expect

from tests.browser.conftest import NewConsole, admin_key, watched_console
from tests.browser.console import Console
from tests.support.management import fake_adapter
from tests.support.server_process import ServerProcess, serve_fake, stop, wait_until

RESTART_MS = 60_000


def port_of(server: ServerProcess) -> str:
    return str(urlsplit(server.url).port)


def test_a_lost_server_is_shown_and_the_page_recovers_by_itself(browser: Browser, tmp_path: Path):
    data_dir = tmp_path / "data"
    key = admin_key(data_dir)
    with (
        serve_fake(data_dir) as first,
        watched_console(browser, first.url, 1280, 800, "light") as console,
    ):
        console.watch.expect_no_answer()
        # The new process answers this until its Redis and engine are ready.
        console.watch.expect_status(503)
        console.start_session(key)
        page = console.open("#/access")
        expect(page.get_by_test_id("tenant-row").first).to_be_visible()
        page = console.open("#/live")
        lost = page.get_by_test_id("lost-server")
        expect(lost).to_have_count(0)
        stop(first)
        expect(lost).to_be_visible(timeout=RESTART_MS)
        # The data shown before stays readable.
        expect(page.get_by_role("heading", name="Live")).to_be_visible()
        with serve_fake(data_dir, "--port", port_of(first)) as second:
            expect(lost).to_have_count(0, timeout=RESTART_MS)
            # The session outlived the process.
            page.get_by_role("link", name="Tenants & keys").click()
            expect(page.get_by_test_id("tenant-row").first).to_be_visible(timeout=RESTART_MS)
            stop(second)
            console.page.goto("about:blank")


def is_held(page: Page, held: list[Route]) -> bool:
    """Playwright runs route handlers only during calls to it, hence the wait."""
    page.wait_for_timeout(20)
    return bool(held)


def test_an_upload_continues_by_itself_after_a_server_restart(browser: Browser, tmp_path: Path):
    data_dir = tmp_path / "data"
    key = admin_key(data_dir)
    held: list[Route] = []
    sent: list[str] = []

    def note(request: Request) -> None:
        if request.method in ("POST", "PUT"):
            sent.append(f"{request.method} {request.url.rsplit('/', 1)[1]}")

    with (
        serve_fake(data_dir) as first,
        watched_console(browser, first.url, 1280, 800, "light") as console,
    ):
        console.watch.expect_no_answer()
        console.watch.expect_status(503)
        console.start_session(key)
        page = console.page
        page.on("request", note)
        # The weights are in transit when the server stops.
        page.route("**/files/adapter_model.safetensors", lambda route: held.append(route))
        with page.expect_request("**/files/adapter_model.safetensors"):
            console.upload("lasting", fake_adapter(tmp_path / "lasting", 1))
        wait_until(lambda: is_held(page, held), "the weights are held")
        stop(first)
        held[0].abort()
        console.let_through("**/files/adapter_model.safetensors")
        expect(page.get_by_test_id("upload-waits")).to_be_visible()
        with serve_fake(data_dir, "--port", port_of(first)) as second:
            expect(page.get_by_test_id("upload-ready")).to_contain_text("Version 1 is live", timeout=RESTART_MS)
            # One session, whose configuration was sent once.
            assert (sent.count("POST uploads"), sent.count("PUT adapter_config.json")) == (1, 1)
            stop(second)
            page.goto("about:blank")


def test_an_unfinished_upload_can_be_resumed_from_its_address_after_a_restart(browser: Browser, tmp_path: Path):
    data_dir = tmp_path / "data"
    key = admin_key(data_dir)
    folder = fake_adapter(tmp_path / "left", 1)
    with (
        serve_fake(data_dir) as first,
        watched_console(browser, first.url, 390, 844, "dark") as console,
    ):
        console.watch.expect_no_answer()
        console.watch.expect_status(503)
        console.start_session(key)
        page = console.page
        page.on("dialog", lambda dialog: dialog.accept())
        page.route("**/files/adapter_model.safetensors", lambda _: None)
        with page.expect_request("**/files/adapter_model.safetensors"):
            console.upload("left", folder)
        stop(first)
        with serve_fake(data_dir, "--port", port_of(first)) as second:
            page.reload()
            console.let_through("**/files/adapter_model.safetensors")
            expect(page.get_by_test_id("stepper")).to_have_attribute("data-state", "open", timeout=RESTART_MS)
            page.get_by_role("link", name="Continue").click()
            page.get_by_test_id("folder-input").set_input_files(folder)
            page.get_by_role("button", name="Resume upload").click()
            expect(page.get_by_test_id("upload-ready")).to_be_visible(timeout=RESTART_MS)
            stop(second)
            page.goto("about:blank")


def test_settings_are_requested_again_after_no_response(new_console: NewConsole, admin_secret: str):
    console = new_console()
    console.watch.expect_no_answer()
    console.start_session(admin_secret)
    page = console.page
    page.route("**/v1/config", lambda route: route.abort())
    page.goto(f"{console.url}/ui/#/settings")
    expect(page.get_by_test_id("failure")).to_contain_text("this page retries automatically")
    console.let_through("**/v1/config")
    expect(page.get_by_test_id("setting").first).to_be_visible()


def test_the_session_is_requested_again_after_a_503(console: Console):
    console.watch.expect_status(503)
    page = console.open("#/adapters")
    body = {"error": {"message": "Not yet.", "type": "service_unavailable", "code": "service_unavailable"}}
    page.route("**/v1/session", lambda route: route.fulfill(status=503, json=body))
    page.reload()
    expect(page.get_by_text("Not yet.")).to_be_visible()
    console.let_through("**/v1/session")
    expect(page.get_by_role("heading", level=1)).to_have_text("Adapters")


def test_the_notice_of_a_lost_server_goes_away_even_if_a_views_script_was_lost_too(console: Console):
    console.watch.expect_no_answer()
    page = console.open("#/adapters")
    page.route("**/assets/live*.js", lambda route: route.abort())
    page.route("**/v1/**", lambda route: route.abort())
    lost = page.get_by_test_id("lost-server")
    page.get_by_label("Search").fill("a")
    expect(lost).to_be_visible()
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_test_id("failure")).to_contain_text("Part of this page could not be loaded")
    console.let_through("**/v1/**")
    expect(lost).to_have_count(0)
    console.let_through("**/assets/live*.js")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Live")

"""What the engines hold now, and the history of their memory."""

import re
from pathlib import Path

from playwright.sync_api import Browser, Route, expect

from tests.browser.conftest import NewConsole, admin_key, watched_console
from tests.browser.console import Console
from tests.browser.tenant import Tenant
from tests.browser.test_requests import RENEWED_MS, endless_request
from tests.browser.watch import NARROW_PX
from tests.support.demo_questions import ADAPTER_DIR
from tests.support.server_process import serve_fake, stop

SAMPLE_MS = 60_000
"""Time to wait for a sample of a series, which is written every 10 s."""


def test_a_used_adapter_is_shown_in_memory_and_links_to_its_page(console: Console, tenant: Tenant):
    tenant.add("resident", ADAPTER_DIR / "uppercase")
    body = {"model": "resident", "prompt": "hello", "max_tokens": 1}
    assert tenant.http.post("/v1/completions", json=body).status_code == 200
    page = console.open("#/live")
    expect(page.get_by_test_id("arena-strip").locator("rect").first).to_be_visible()
    page.get_by_role("link", name="resident v1").click()
    expect(page.get_by_test_id("version-1")).to_be_visible()


def test_a_long_adapter_name_in_memory_fits_a_phone(console: Console, tenant: Tenant):
    tenant.add("W" * 64, ADAPTER_DIR / "uppercase")
    body = {"model": "W" * 64, "prompt": "hello", "max_tokens": 1}
    assert tenant.http.post("/v1/completions", json=body).status_code == 200
    console.page.set_viewport_size({"width": NARROW_PX, "height": 844})
    page = console.open("#/live")
    expect(page.get_by_role("link", name="W" * 64)).to_be_visible()
    console.watch.check()


def test_quantized_weights_are_shown(console: Console):
    def with_weights(route: Route) -> None:
        live = route.fetch().json()
        live["engines"].append({**live["engines"][0], "id": "small", "weights": "int8"})
        route.fulfill(json=live)

    console.page.route("**/v1/live", with_weights)
    page = console.open("#/live")
    small, other = page.get_by_label("Engine small"), page.locator("section[aria-label^='Engine ']").first
    expect(small.locator("header")).to_contain_text(re.compile(r"· \w+, weights int8 · started"))
    expect(other.locator("header")).not_to_contain_text("weights")


def test_queues_are_listed_by_tenant_and_adapter_and_link_to_their_requests(console: Console, tenant: Tenant):
    waiting = {"tenant": tenant.name, "adapter": "uppercase", "num_running": 1, "num_queued": 2}

    def with_queue(route: Route) -> None:
        live = route.fetch().json()
        live["engines"][0]["queues"] = [{**waiting, "num_tokens_waiting": 300}]
        route.fulfill(json=live)

    console.page.route("**/v1/live", with_queue)
    page = console.open("#/live")
    row = page.get_by_role("row").filter(has_text=tenant.name)
    expect(row.get_by_role("cell")).to_have_text([tenant.name, "uppercase", "1", "2", "300"])
    row.get_by_role("link", name="uppercase").click()
    expect(page).to_have_url(f"{console.url}/ui/#/requests?adapter=uppercase&state=running")


def test_the_number_of_running_requests_links_to_them(browser: Browser, tmp_path: Path):
    data_dir = tmp_path / "data"
    key = admin_key(data_dir)
    with serve_fake(data_dir) as server:
        with (
            watched_console(browser, server.url, 1280, 800, "light") as console,
            endless_request(server, key) as request_id,
        ):
            console.start_session(key)
            page = console.open("#/live")
            page.locator(".engine-figures").get_by_role("link", name="1").click()
            expect(page.get_by_test_id("request-row")).to_have_count(1, timeout=RENEWED_MS)
            page.get_by_test_id("request-row").get_by_role("link").first.click()
            expect(page.locator("dl")).to_contain_text(request_id)
        stop(server)


def test_loads_and_evictions_are_charted_for_an_admin_of_all_tenants(
    new_console: NewConsole, admin_secret: str, tenant: Tenant
):
    tenant.add("loaded", ADAPTER_DIR / "uppercase")
    console = new_console()
    console.start_session(admin_secret)
    page = console.open("#/live")
    history = page.get_by_test_id("memory-history")
    chart = history.get_by_role("img", name="Loads and evictions")
    expect(chart).to_have_accessible_name("Loads and evictions, latest: Loaded 0, Evicted 0", timeout=SAMPLE_MS)
    history.get_by_role("button", name="24 h").click()
    expect(history.get_by_role("heading", name="Loads and evictions per 60 s")).to_be_visible()
    expect(page).to_have_url(f"{console.url}/ui/#/live?window=24h")


def test_a_tenant_sees_a_notice_that_the_memory_is_shared(console: Console, tenant: Tenant):
    body = {"model": "uppercase", "prompt": "hello", "max_tokens": 1}
    assert tenant.http.post("/v1/completions", json=body).status_code == 200
    page = console.open("#/live")
    shared = page.get_by_test_id("memory-history").get_by_text("Tenants share this memory")
    expect(shared).to_be_visible(timeout=SAMPLE_MS)

"""The request log, aborting running requests, the audit log, and exporting both logs as files."""

import csv
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import NewConsole, admin_key, watched_console
from tests.browser.console import Console
from tests.browser.tenant import Tenant, client
from tests.support.adapter_variants import twin
from tests.support.demo_questions import ADAPTER_DIR
from tests.support.server_process import ServerProcess, serve_fake, stop, wait_until

ENDLESS = 1 << 25
RENEWED_MS = 20_000


@contextmanager
def endless_request(server: ServerProcess, key: str) -> Iterator[str]:
    """Yields the id of a request that runs until it is aborted."""
    body = {"model": "fake", "prompt": [1, 2], "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
    with client(server.url, key) as http, http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        # Kept in a variable: its deletion would close the connection.
        chunks = response.iter_raw()
        next(chunks)
        yield response.headers["x-request-id"]


def saved(console: Console, button: str) -> str:
    with console.page.expect_download() as download:
        console.page.get_by_role("button", name=button, exact=True).click()
    return download.value.path().read_text()


def ask(tenant: Tenant, model: str, count: int = 1) -> None:
    """Requests exactly two tokens: they are sampled, so without `ignore_eos` the answer could end early."""
    for _ in range(count):
        body = {"model": model, "prompt": "hello", "max_tokens": 2, "ignore_eos": True}
        assert tenant.http.post("/v1/completions", json=body).status_code == 200


def test_a_running_request_is_aborted_from_its_row(browser: Browser, tmp_path: Path):
    data_dir = tmp_path / "data"
    key = admin_key(data_dir)
    with serve_fake(data_dir) as server:
        with (
            watched_console(browser, server.url, 1280, 800, "light") as console,
            endless_request(server, key) as request_id,
        ):
            console.start_session(key)
            page = console.open("#/requests?state=running")
            row = page.get_by_test_id("request-row")
            expect(row).to_have_count(1, timeout=RENEWED_MS)
            row.get_by_role("button", name="Abort").click()
            dialog = console.dialog("Abort this request?")
            expect(dialog).to_contain_text(request_id)
            dialog.get_by_role("button", name="Abort request").click()
            console.toast("Request aborted.")
            with client(server.url, key) as http:
                wait_until(lambda: state_of(http, request_id) == "abort", "the request ended on the server")
            expect(page.get_by_test_id("empty")).to_be_visible(timeout=RENEWED_MS)
            page.goto(f"{server.url}/ui/#/requests/{request_id}")
            expect(page.get_by_role("heading", level=1)).to_contain_text("abort")
            expect(page.get_by_role("button", name="Abort")).to_have_count(0)
        stop(server)


def state_of(http: httpx.Client, request_id: str) -> str:
    return http.get(f"/v1/requests/{request_id}").json()["state"]


def test_a_row_links_to_its_request_and_the_request_to_its_adapter(console: Console, tenant: Tenant):
    tenant.add("asked", ADAPTER_DIR / "uppercase")
    ask(tenant, "asked")
    page = console.open("#/requests?adapter=asked")
    page.get_by_test_id("request-row").get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("length")
    expect(page.get_by_text("Time breakdown")).to_be_visible()
    expect(page.locator("dl")).to_contain_text("2 tokens")
    # With a 24-hour clock, as in the charts.
    expect(page.locator("dd").nth(1)).to_have_text(re.compile(r", \d\d:\d\d:\d\d$"))
    page.locator("dl").get_by_role("link", name="asked v1").click()
    expect(page.get_by_test_id("version-1")).to_be_visible()


def test_an_unknown_request_is_reported_with_a_link_to_all_requests(console: Console):
    console.watch.expect_status(404)
    page = console.open("#/requests/there-was-no-such-request")
    expect(page.get_by_test_id("failure")).to_contain_text("not known")
    page.get_by_role("link", name="All requests").click()
    expect(page.get_by_role("heading", name="Requests", exact=True)).to_be_visible()


def test_filters_are_kept_in_the_address_and_an_empty_result_shows_an_example_command(console: Console, tenant: Tenant):
    ask(tenant, "uppercase")
    page = console.open("#/requests")
    expect(page.get_by_test_id("request-row")).to_have_count(1)
    page.get_by_label("Any state").select_option("error")
    expect(page).to_have_url(f"{console.url}/ui/#/requests?state=error")
    command = page.get_by_test_id("empty").locator("code")
    expect(command).to_contain_text(f"curl {console.url}/v1/completions")
    expect(command).to_contain_text("$LORASERVE_API_KEY")
    page.get_by_label("Any state").select_option("")
    expect(page.get_by_test_id("request-row")).to_have_count(1)


def test_an_admin_of_all_tenants_can_see_the_requests_of_all_at_once(
    new_console: NewConsole, admin_secret: str, tenant: Tenant
):
    ask(tenant, "uppercase")
    console = new_console()
    console.start_session(admin_secret)
    page = console.open("#/requests?tenant=*")
    row = page.get_by_test_id("request-row").filter(has_text=tenant.name)
    expect(row).to_have_count(1)
    row.get_by_role("link").first.click()
    expect(page.locator("dl")).to_contain_text(f"tenant {tenant.name}")


def test_a_key_in_the_log_of_all_tenants_links_to_its_requests(
    new_console: NewConsole, admin_secret: str, tenant: Tenant
):
    ask(tenant, "uppercase")
    console = new_console()
    console.start_session(admin_secret)
    page = console.open("#/requests?tenant=*")
    key_id = tenant.operator_key.removeprefix("ls-").split("_", 1)[0]
    page.get_by_test_id("request-row").get_by_role("link", name=key_id).first.click()
    expect(page.get_by_label("Key", exact=True)).to_have_value(key_id)
    expect(page.get_by_test_id("request-row")).to_have_count(1)


def test_the_export_has_all_matching_requests_not_only_those_shown(console: Console, tenant: Tenant):
    ask(tenant, "uppercase", 3)
    ask(tenant, "reverse", 101)
    page = console.open("#/requests?adapter=reverse")
    expect(page.get_by_test_id("request-row")).to_have_count(100)
    rows: list[dict[str, Any]] = json.loads(saved(console, "Export"))
    assert [row["adapter"] for row in rows] == ["reverse"] * 101
    assert len({row["id"] for row in rows}) == 101


def test_the_audit_shows_values_before_and_after_a_change(new_console: NewConsole, tenant: Tenant, tmp_path: Path):
    tenant.add("moved", ADAPTER_DIR / "uppercase")
    tenant.add("moved", twin(tmp_path / "twin", "uppercase"), activate=False)
    assert tenant.http.put("/v1/adapters/moved/aliases/live", json={"version": 2}).is_success
    console = new_console()
    console.start_session(tenant.key("admin"))
    page = console.open("#/requests/audit?action=alias.move")
    entry = page.get_by_test_id("audit-entry")
    expect(entry).to_have_count(1)
    expect(entry).to_contain_text(f"{tenant.name}/moved")
    expect(entry).to_contain_text(tenant.operator_key.removeprefix("ls-").split("_", 1)[0])
    entry.get_by_role("button", name="Show changes").click()
    changed = entry.get_by_role("row", name="aliases.live.version")
    expect(changed.locator("del")).to_have_text("1")
    expect(changed.locator("ins")).to_have_text("2")
    entry.get_by_role("link", name=f"{tenant.name}/moved").click()
    expect(page.get_by_test_id("version-2")).to_be_visible()


def test_the_audit_is_filtered_by_actor_and_exported_as_filtered(new_console: NewConsole, tenant: Tenant):
    admin_secret = tenant.key("admin")
    for number in range(3):
        body = {"role": "infer", "name": f"number {number}"}
        with client(str(tenant.http.base_url), admin_secret) as http:
            assert http.post("/v1/keys", json=body).status_code == 201
    console = new_console()
    console.start_session(admin_secret)
    page = console.open("#/requests/audit")
    actor = admin_secret.removeprefix("ls-").split("_", 1)[0]
    page.get_by_role("button", name=actor).first.click()
    expect(page).to_have_url(f"{console.url}/ui/#/requests/audit?actor={actor}")
    page.get_by_label("Action, such as").fill("key.create")
    page.get_by_label("Action, such as").press("Enter")
    expect(page.get_by_test_id("audit-entry")).to_have_count(3)
    rows = list(csv.DictReader(saved(console, "Export CSV").splitlines()))
    assert [(row["actor"], row["action"]) for row in rows] == [(actor, "key.create")] * 3
    lines = [json.loads(line) for line in saved(console, "Export JSON lines").splitlines()]
    assert [line["after"]["name"] for line in lines] == ["number 2", "number 1", "number 0"]


@pytest.mark.parametrize(
    ("view", "path", "label"),
    [("requests", "/v1/requests?", "Adapter"), ("requests/audit", "/v1/audit?", "Action, such as")],
)
def test_text_being_typed_in_a_filter_survives_a_refresh_of_the_log(
    new_console: NewConsole, tenant: Tenant, view: str, path: str, label: str
):
    console = new_console()
    console.start_session(tenant.key("admin"))
    console.page.clock.install()
    page = console.open(f"#/{view}")
    field = page.get_by_label(label)
    field.press_sequentially("up")
    with page.expect_response(lambda response: path in response.url):
        page.clock.fast_forward(RENEWED_MS)
    field.press_sequentially("per")
    expect(field).to_have_value("upper")
    field.press("Enter")
    expect(page).to_have_url(re.compile("=upper$"))
    expect(field).to_have_value("upper")


def test_erased_filter_text_does_not_hide_a_filter_set_by_a_click(new_console: NewConsole, tenant: Tenant):
    admin_secret = tenant.key("admin")
    with client(str(tenant.http.base_url), admin_secret) as http:
        assert http.post("/v1/keys", json={"role": "infer", "name": "x"}).status_code == 201
    console = new_console()
    console.start_session(admin_secret)
    page = console.open("#/requests/audit")
    field = page.get_by_label("Actor", exact=True)
    field.press_sequentially("x")
    field.press("Backspace")
    actor = admin_secret.removeprefix("ls-").split("_", 1)[0]
    page.get_by_role("button", name=actor).first.click()
    expect(page).to_have_url(f"{console.url}/ui/#/requests/audit?actor={actor}")
    expect(field).to_have_value(actor)


def test_a_refused_action_is_in_the_audit(new_console: NewConsole, tenant: Tenant):
    viewer = tenant.key("viewer")
    with client(str(tenant.http.base_url), viewer) as http:
        assert http.delete("/v1/adapters/uppercase").status_code == 403
    console = new_console()
    console.start_session(tenant.key("admin"))
    page = console.open("#/requests/audit")
    entry = page.get_by_test_id("audit-entry").filter(has_text="refused")
    expect(entry).to_contain_text(viewer.removeprefix("ls-").split("_", 1)[0])


def test_the_whole_reason_of_a_refused_action_can_be_read_on_a_phone(new_console: NewConsole, tenant: Tenant):
    with client(str(tenant.http.base_url), tenant.key("viewer")) as http:
        assert http.delete("/v1/adapters/uppercase").status_code == 403
    console = new_console(width=390)
    console.start_session(tenant.key("admin"))
    page = console.open("#/requests/audit?action=request.refused")
    subject = page.get_by_test_id("audit-entry").locator(".audit-subject")
    expect(subject).to_contain_text("forbidden")
    assert subject.evaluate("(element) => element.scrollWidth <= element.clientWidth")


def test_the_whole_error_of_a_request_is_in_its_tooltip(console: Console, tenant: Tenant):
    tenant.add("asked", ADAPTER_DIR / "uppercase")
    body = {"model": "asked", "prompt": "hello", "max_tokens": 100_000}
    assert tenant.http.post("/v1/completions", json=body).status_code == 400
    page = console.open("#/requests?state=error")
    expect(page.get_by_title("Failed: context length exceeded")).to_be_visible()

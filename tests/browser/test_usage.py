"""The usage of tenants: every number in the charts and tables, and the rows behind it."""

import csv

import httpx
import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import NewConsole
from tests.browser.console import Console
from tests.browser.tenant import Tenant, client
from tests.support.demo_questions import ADAPTER_DIR

NUM_OUTPUT = 3


@pytest.fixture
def used(tenant: Tenant) -> Tenant:
    """A tenant with five requests: three for its own adapter with one key, two for a shared one with another."""
    tenant.add("own", ADAPTER_DIR / "uppercase")
    other = tenant.key("operator", name="other")
    with client(str(tenant.http.base_url), other) as http:
        for model, asking in (("own", tenant.http),) * 3 + (("reverse", http),) * 2:
            body = {"model": model, "prompt": "hello", "max_tokens": NUM_OUTPUT, "ignore_eos": True}
            assert asking.post("/v1/completions", json=body).status_code == 200
    return tenant


def usage_row(console: Console, name: str) -> Locator:
    row = console.page.get_by_test_id("usage-row").filter(has_text=name)
    expect(row).to_have_count(1)
    return row


def cell(row: Locator, label: str) -> Locator:
    return row.locator(f"[data-label='{label}']")


def test_requests_and_tokens_are_counted_by_adapter(console: Console, used: Tenant):
    page = console.open("#/requests/usage")
    expect(page.get_by_test_id("usage-row")).to_have_count(2)
    own = usage_row(console, "own")
    expect(cell(own, "Requests")).to_have_text("3")
    expect(cell(own, "Output tokens")).to_have_text(str(3 * NUM_OUTPUT))
    expect(cell(own, "Errors")).to_have_text("0")
    shared = usage_row(console, "shared/reverse")
    expect(cell(shared, "Requests")).to_have_text("2")
    (report,) = used.http.get("/v1/usage").json()["data"]
    tokens = report["num_prompt_tokens"] + report["num_output_tokens"]
    expect(page.get_by_role("group", name=f"Tokens: {tokens} total")).to_be_visible()
    chart = page.get_by_role("group", name="Requests: 5 total")
    expect(chart.locator("li").filter(has_text="own")).to_contain_text("3")


def test_hovering_a_step_of_a_chart_shows_that_steps_values(console: Console, used: Tenant):
    page = console.open("#/requests/usage")
    chart = page.get_by_role("group", name="Requests: 5 total")
    legend = chart.locator("li")
    expect(legend.first).to_have_text("Total")
    box = chart.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
    expect(legend.first).not_to_have_text("Total")
    expect(legend.filter(has_text="own")).to_contain_text("0")
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    expect(legend.filter(has_text="own")).to_contain_text("3")
    page.mouse.move(0, 0)
    expect(legend.first).to_have_text("Total")


def test_a_number_links_to_the_requests_behind_it(console: Console, used: Tenant):
    page = console.open("#/requests/usage")
    cell(usage_row(console, "own"), "Requests").get_by_role("link").click()
    expect(page.get_by_test_id("request-row")).to_have_count(3)
    page.go_back()
    cell(usage_row(console, "shared/reverse"), "Requests").get_by_role("link").click()
    expect(page.get_by_test_id("request-row")).to_have_count(2)


def test_a_name_drills_down_and_its_filter_can_be_removed(console: Console, used: Tenant):
    key_id = used.operator_key.removeprefix("ls-").split("_", 1)[0]
    page = console.open("#/requests/usage?by=key")
    expect(page.get_by_test_id("usage-row")).to_have_count(2)
    usage_row(console, key_id).get_by_role("link", name=key_id).click()
    expect(page.get_by_test_id("usage-row")).to_have_count(1)
    expect(cell(usage_row(console, "own"), "Requests")).to_have_text("3")
    page.get_by_role("button", name=f"Remove the filter {key_id}").click()
    expect(page.get_by_test_id("usage-row")).to_have_count(2)
    usage_row(console, "own").get_by_role("link", name="own").click()
    usage_row(console, "own v1").get_by_role("link", name="own v1").click()
    expect(cell(usage_row(console, key_id), "Requests")).to_have_text("3")


def test_the_time_span_is_kept_in_the_address_and_the_export_matches_the_view(console: Console, used: Tenant):
    page = console.open("#/requests/usage")
    page.get_by_role("button", name="30 days").click()
    expect(page).to_have_url(f"{console.url}/ui/#/requests/usage?span=30d")
    expect(page.get_by_role("heading", name="Requests by day")).to_be_visible()
    expect(cell(usage_row(console, "own"), "Requests")).to_have_text("3")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export CSV").click()
    assert used.name in download.value.suggested_filename
    rows = list(csv.DictReader(download.value.path().read_text().splitlines()))
    assert {row["adapter"]: row["requests"] for row in rows} == {"own": "3", "shared/reverse": "2"}


def test_no_usage_is_reported_with_a_command_for_a_first_request(console: Console):
    page = console.open("#/requests/usage")
    expect(page.get_by_test_id("empty")).to_contain_text("No usage in the last 24 h")
    expect(page.get_by_test_id("empty").locator("code")).to_contain_text("/v1/completions")


def test_an_admin_drills_down_from_all_tenants_to_one_and_its_keys(
    new_console: NewConsole, admin_secret: str, used: Tenant
):
    console = new_console()
    console.start_session(admin_secret)
    page = console.open("#/access")
    page.get_by_role("link", name="Usage of all tenants").click()
    of_tenant = usage_row(console, used.name)
    expect(cell(of_tenant, "Requests")).to_have_text("5")
    of_tenant.get_by_role("button", name=used.name).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Usage of {used.name}")
    expect(cell(usage_row(console, "own"), "Requests")).to_have_text("3")
    page.get_by_role("link", name="Keys", exact=True).click()
    page.get_by_role("link", name="Usage of other:").click()
    expect(page.get_by_test_id("usage-row")).to_have_count(1)
    expect(cell(usage_row(console, "shared/reverse"), "Requests")).to_have_text("2")


def test_numbers_in_a_tenants_row_link_to_its_adapters_and_usage(
    new_console: NewConsole, admin_secret: str, used: Tenant
):
    console = new_console()
    console.start_session(admin_secret)
    page = console.open("#/access")
    page.get_by_role("button", name=f"Adapters of {used.name}:").click()
    expect(page.get_by_test_id("adapter-row").get_by_role("link", name="own", exact=True)).to_be_visible()
    page.go_back()
    usage = page.get_by_role("button", name=f"Usage of {used.name}:")
    expect(usage).to_contain_text("5")
    usage.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Usage of {used.name}")


def test_an_adapters_traffic_is_charted_by_version(console: Console, used: Tenant):
    page = console.open("#/adapters/own?tab=traffic")
    chart = page.get_by_role("group", name="Requests: 3 total")
    expect(chart.locator("li").filter(has_text="own v1")).to_contain_text("3")
    expect(page.get_by_role("row", name="v1")).to_contain_text("3")


def test_a_viewer_sees_its_tenants_usage(new_console: NewConsole, used: Tenant):
    console = new_console()
    console.start_session(used.key("viewer"))
    page = console.open("#/requests")
    page.get_by_role("link", name="Usage").click()
    expect(cell(usage_row(console, "own"), "Requests")).to_have_text("3")
    expect(page.get_by_role("button", name="tenant", exact=True)).to_have_count(0)


def test_another_tenants_usage_is_not_shown(new_console: NewConsole, admin: httpx.Client, used: Tenant):
    assert admin.post("/v1/tenants", json={"id": f"beside-{used.name}"}).status_code == 201
    console = new_console()
    answer = admin.post("/v1/keys", json={"role": "admin", "tenant": f"beside-{used.name}"})
    console.start_session(answer.json()["secret"])
    page = console.open("#/access/usage?by=tenant")
    expect(page.get_by_test_id("empty")).to_be_visible()
    assert used.name not in page.get_by_role("main").inner_text().replace(f"beside-{used.name}", "")


def test_more_groups_than_the_server_sends_are_charted_together(console: Console, used: Tenant):
    refusal = {"error": {"message": "Too many.", "type": "invalid_request_error", "param": "group_by", "code": "x"}}
    refused = "**/v1/usage?*interval=hour&group_by=adapter"
    console.watch.expect_status(400)
    console.page.route(refused, lambda route: route.fulfill(status=400, json=refusal))
    page = console.open("#/requests/usage")
    expect(page.get_by_text("There are too many adapters to chart each of them.")).to_be_visible()
    chart = page.get_by_role("group", name="Requests: 5 total")
    expect(chart.locator("li").filter(has_text="all")).to_contain_text("5")
    expect(page.get_by_test_id("usage-row")).to_have_count(2)

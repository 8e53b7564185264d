"""Finding an adapter among many."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import NewConsole, admin_key
from tests.browser.console import Console
from tests.browser.many_adapters import MANY_TENANT, NUM_MANY, many_name, write_many_adapters
from tests.browser.tenant import Tenant, client, key_for
from tests.support.demo_questions import ADAPTER_DIR, ADAPTERS
from tests.support.server_process import serve_fake, stop

MAX_ROWS = 80


@pytest.fixture(scope="module")
def server_of_many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of a server that has the tenant with many adapters, and the key of that tenant's operator."""
    data_dir = tmp_path_factory.mktemp("many")
    write_many_adapters(data_dir, NUM_MANY)
    admin_secret = admin_key(data_dir)
    with serve_fake(data_dir) as server:
        with client(server.url, admin_secret) as admin:
            yield server.url, key_for(admin, MANY_TENANT, "operator")
        stop(server)


@pytest.fixture
def many(new_console: NewConsole, server_of_many: tuple[str, str]) -> Console:
    url, key = server_of_many
    console = new_console(url)
    console.start_session(key)
    return console


def test_ten_thousand_adapters_render_only_a_screenful_of_rows_at_any_scroll_position(many: Console):
    page = many.open("#/adapters")
    rows = page.get_by_test_id("adapter-row")
    expect(rows.first).to_contain_text(many_name(0))
    for _ in range(7):
        height = page.evaluate("document.body.scrollHeight")
        page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        # The next page of the list makes the document longer.
        page.wait_for_function("(before) => document.body.scrollHeight > before", arg=height)
        assert rows.count() <= MAX_ROWS
    page.evaluate("window.scrollTo(0, 0)")
    expect(page.get_by_text(many_name(0))).to_be_visible()
    expect(page.get_by_text(many_name(600))).to_have_count(0)
    page.evaluate("window.scrollTo(0, 44 * 600)")
    expect(page.get_by_text(many_name(600))).to_be_visible()
    assert rows.count() <= MAX_ROWS


def test_returning_from_an_adapter_restores_the_lists_scroll_position(many: Console):
    many.watch.expect_status(500)  # for an adapter whose content does not exist
    page = many.open("#/adapters")
    rows = page.get_by_test_id("adapter-row")
    expect(rows.first).to_be_visible()
    for _ in range(6):  # more rows than a refresh of the list fetches at once
        height = page.evaluate("document.body.scrollHeight")
        page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        page.wait_for_function("(before) => document.body.scrollHeight > before", arg=height)
    page.evaluate("window.scrollTo(0, 44 * 550)")
    place = page.evaluate("window.scrollY")
    page.get_by_role("link", name=many_name(560)).click()
    expect(page.get_by_role("heading", name=many_name(560), level=1)).to_be_visible()
    page.evaluate("window.scrollTo(0, 0)")
    page.go_back()
    expect(page.get_by_text(many_name(560))).to_be_in_viewport()
    assert page.evaluate("window.scrollY") == place
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    expect(page.get_by_text(many_name(699))).to_be_visible()


def test_a_list_scrolled_far_down_stays_put_when_its_tab_is_shown_again(many: Console):
    page = many.open("#/adapters")
    expect(page.get_by_test_id("adapter-row").first).to_be_visible()
    for _ in range(6):
        height = page.evaluate("document.body.scrollHeight")
        page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        page.wait_for_function("(before) => document.body.scrollHeight > before", arg=height)
    page.evaluate("window.scrollTo(0, 44 * 650)")
    expect(page.get_by_text(many_name(650))).to_be_in_viewport()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    # The page's own bar is requested again at the same moment.
    page.wait_for_timeout(1000)
    expect(page.get_by_text(many_name(650))).to_be_in_viewport()
    assert not any("limit=500" in url for url in asked)


def test_search_finds_one_of_ten_thousand_on_the_server(many: Console):
    page = many.open("#/adapters")
    page.get_by_test_id("adapter-search").fill(many_name(NUM_MANY - 1))
    rows = page.get_by_test_id("adapter-row")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text(many_name(NUM_MANY - 1))
    expect(page).to_have_url(f"{many.url}/ui/#/adapters?q={many_name(NUM_MANY - 1)}")


def test_sorting_covers_the_whole_list_and_is_kept_in_the_address(many: Console):
    page = many.open("#/adapters")
    page.get_by_role("button", name="Size").click()
    expect(page.get_by_test_id("adapter-row").first).to_contain_text(many_name(NUM_MANY - 1))
    expect(page).to_have_url(f"{many.url}/ui/#/adapters?sort=-size")
    page.get_by_role("button", name="Size").click()
    expect(page.get_by_role("columnheader", name="Size")).to_have_attribute("aria-sort", "ascending")


def test_a_filter_survives_a_reload_and_back_navigation(console: Console, tenant: Tenant):
    tenant.add("mine", ADAPTER_DIR / "uppercase")
    assert tenant.http.patch("/v1/adapters/mine", json={"enabled": False}).is_success
    page = console.open("#/adapters")
    expect(page.get_by_test_id("adapter-row")).to_have_count(1 + len(ADAPTERS))
    page.get_by_label("Status").select_option("disabled")
    expect(page.get_by_test_id("adapter-row")).to_have_count(1)
    page.reload()
    expect(page.get_by_test_id("adapter-row")).to_have_count(1)
    page.get_by_role("link", name="mine").click()
    expect(page.get_by_test_id("version-1")).to_be_visible()
    page.go_back()
    expect(page.get_by_test_id("adapter-row")).to_have_count(1)
    expect(page.get_by_label("Status")).to_have_value("disabled")


def test_an_empty_search_result_offers_to_show_all_adapters(console: Console):
    page = console.open("#/adapters?q=there-is-no-such-thing")
    expect(page.get_by_test_id("empty")).to_be_visible()
    page.get_by_role("button", name="Show all adapters").click()
    expect(page.get_by_test_id("adapter-row")).to_have_count(len(ADAPTERS))
    expect(page.get_by_test_id("adapter-search")).to_have_value("")


def test_disabling_several_adapters_at_once_can_be_undone(console: Console, tenant: Tenant):
    for name in ("first", "second"):
        tenant.add(name, ADAPTER_DIR / "uppercase")
    page = console.open("#/adapters")
    for name in ("first", "second"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("region", name="Selected adapters").get_by_role("button", name="Disable").click()
    toast = console.toast("Disabled 2 adapters.")
    expect(page.get_by_test_id("adapter-row").filter(has_text="disabled")).to_have_count(2)
    toast.get_by_role("button", name="Undo").click()
    console.toast("Undone.")
    assert tenant.http.get("/v1/adapters/first").json()["enabled"] is True


def test_deleting_several_adapters_requires_typing_their_number_and_can_be_undone(console: Console, tenant: Tenant):
    console.never_refresh()
    for name in ("first", "second"):
        tenant.add(name, ADAPTER_DIR / "uppercase")
    page = console.open("#/adapters")
    # Of all adapters shown, only the tenant's own can be changed.
    page.get_by_label("Select all shown").check()
    bar = page.get_by_role("region", name="Selected adapters")
    expect(bar).to_contain_text("2 selected")
    bar.get_by_role("button", name="Delete").click()
    dialog = console.dialog("Delete 2 adapters?")
    expect(dialog).to_contain_text("first, second")
    delete = dialog.get_by_role("button", name="Delete", exact=True)
    dialog.get_by_label("Type delete 2 to confirm").fill("delete")
    expect(delete).to_be_disabled()
    dialog.get_by_label("Type delete 2 to confirm").fill("delete 2")
    delete.click()
    toast = console.toast("Deleted 2 adapters.")
    expect(page.get_by_test_id("adapter-row")).to_have_count(len(ADAPTERS))
    assert tenant.http.get("/v1/adapters/first").json()["status"] == "deleted"
    toast.get_by_role("button", name="Undo").click()
    console.toast("Undone.")
    expect(page.get_by_test_id("adapter-row")).to_have_count(len(ADAPTERS) + 2)
    assert [tenant.http.get(f"/v1/adapters/{name}").json()["status"] for name in ("first", "second")] == ["ready"] * 2


def test_on_a_phone_touching_a_card_anywhere_opens_its_adapter(new_console: NewConsole, tenant: Tenant):
    tenant.add("mine", ADAPTER_DIR / "uppercase")
    console = new_console(width=390)
    console.start_session(tenant.operator_key)
    page = console.open("#/adapters?sort=-last_used")
    page.get_by_label("Sort by").select_option("Name")
    expect(page).to_have_url(f"{console.url}/ui/#/adapters")
    card = page.get_by_test_id("adapter-row").filter(has_text="mine")
    card.get_by_role("checkbox").locator("..").click(position={"x": 4, "y": 4})
    expect(page.get_by_role("region", name="Selected adapters")).to_contain_text("1 selected")
    card.click(position={"x": 200, "y": 70})
    expect(page.get_by_test_id("version-1")).to_be_visible()


def test_several_adapters_are_pinned_and_unpinned_at_once(console: Console, tenant: Tenant):
    for name in ("first", "second"):
        tenant.add(name, ADAPTER_DIR / "uppercase")
    page = console.open("#/adapters")
    page.get_by_label("Select all shown").check()
    page.get_by_role("region", name="Selected adapters").get_by_role("button", name="Pin for an hour").click()
    toast = console.toast("Pinned 2 adapters for an hour.")
    expect(page.get_by_test_id("adapter-row").get_by_text("pinned")).to_have_count(2)
    toast.get_by_role("button", name="Undo").click()
    console.toast("Undone.")
    assert tenant.http.get("/v1/adapters/first").json()["pin"] is None


@pytest.mark.parametrize("ttl_s", [86_400, None])
def test_undoing_a_pin_restores_the_previous_pin(console: Console, tenant: Tenant, ttl_s: int | None):
    tenant.add("pinned", ADAPTER_DIR / "uppercase")
    path = "/v1/adapters/pinned"
    assert tenant.http.put(f"{path}/residency", json={"tier": "host", "ttl_s": ttl_s}).is_success
    page = console.open("#/adapters")
    page.get_by_role("checkbox", name="Select pinned").check()
    page.get_by_role("button", name="Pin for an hour").click()
    toast = console.toast("Pinned pinned for an hour.")
    assert tenant.http.get(path).json()["pin"]["tier"] == "device"
    toast.get_by_role("button", name="Undo").click()
    console.toast("Undone.")
    pin = tenant.http.get(path).json()["pin"]
    assert (pin["tier"], pin["until"] is None) == ("host", ttl_s is None)


def test_a_bulk_change_names_the_adapter_that_failed_and_changes_the_others(console: Console, tenant: Tenant):
    console.watch.expect_status(404)
    for name in ("first", "second"):
        tenant.add(name, ADAPTER_DIR / "uppercase")
    page = console.open("#/adapters")
    page.get_by_label("Select all shown").check()
    assert tenant.http.delete("/v1/adapters/second", params={"drain_s": 0}).is_success
    page.get_by_role("region", name="Selected adapters").get_by_role("button", name="Disable").click()
    console.toast("Disabled first.")
    console.toast("second: ")
    assert tenant.http.get("/v1/adapters/first").json()["enabled"] is False


def test_the_option_that_arrow_keys_choose_in_the_jump_dialog_is_visible_on_a_low_screen(console: Console):
    page = console.open()
    page.set_viewport_size({"width": 640, "height": 400})
    page.keyboard.press("Control+k")
    last = page.get_by_role("option").last
    expect(page.get_by_role("option", name="uppercase")).to_be_attached()
    page.keyboard.press("ArrowUp")
    expect(last).to_have_attribute("aria-selected", "true")
    expect(last).to_be_in_viewport()


@pytest.mark.parametrize("combination", ["Control+k", "Meta+k"])
def test_the_jump_dialog_opens_a_page_or_an_adapter_by_keyboard_alone(console: Console, combination: str):
    page = console.open()
    page.keyboard.press(combination)
    box = page.get_by_role("combobox", name="Search adapters and pages")
    expect(box).to_be_focused()
    page.keyboard.type("upper")
    expect(page.get_by_role("option", name="uppercase")).to_be_visible()
    expect(page.get_by_role("option")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("uppercase")
    page.keyboard.press(combination)
    expect(box).to_be_focused()
    page.keyboard.type("live")
    expect(page.get_by_role("option").first).to_have_text("Live")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Live")).to_be_visible()
    page.keyboard.press(combination)
    expect(box).to_be_focused()
    page.keyboard.press("Escape")
    expect(box).to_have_count(0)


def test_enter_does_not_open_a_result_of_an_earlier_query(console: Console, tenant: Tenant):
    tenant.add("aaa-first", ADAPTER_DIR / "uppercase")
    page = console.open()
    page.keyboard.press("Control+k")
    expect(page.get_by_role("option", name="aaa-first")).to_be_visible()
    page.route("**/v1/adapters?q=zzz*", lambda _: None)
    with page.expect_request("**/v1/adapters?q=zzz*"):
        page.keyboard.type("zzz")
    # Results for the empty query do not answer this one.
    page.keyboard.press("Enter")
    expect(page.get_by_role("combobox", name="Search adapters and pages")).to_be_visible()
    expect(page.get_by_role("option", name="aaa-first")).to_have_count(0)
    assert page.url.endswith("/ui/#/")


def test_undoing_a_bulk_change_continues_after_one_failure(console: Console, tenant: Tenant):
    for name in ("gone", "kept"):
        tenant.add(name, ADAPTER_DIR / "uppercase")
    refused: list[str] = []

    def refuse_first(route: Route) -> None:
        if refused:
            route.continue_()
        else:
            refused.append(route.request.url.rsplit("/", 1)[1])
            route.fulfill(status=404, json={"error": {"message": "It is gone."}})

    console.watch.expect_status(404)
    page = console.open("#/adapters")
    for name in ("gone", "kept"):
        page.get_by_role("checkbox", name=f"Select {name}").check()
    page.get_by_role("button", name="Disable").click()
    toast = console.toast("Disabled 2 adapters.")
    page.route(re.compile("/v1/adapters/(gone|kept)$"), refuse_first)
    toast.get_by_role("button", name="Undo").click()
    console.toast("Could not undo: It is gone.")
    (other,) = {"gone", "kept"} - set(refused)
    assert tenant.http.get(f"/v1/adapters/{other}").json()["enabled"] is True

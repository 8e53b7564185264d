"""Logging in, what each role may see, and logging out."""

import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import NewConsole
from tests.browser.console import Console
from tests.browser.tenant import Tenant
from tests.support.demo_questions import ADAPTER_DIR


def test_logging_in_with_a_key_leaves_no_trace_of_it_in_the_browser(new_console: NewConsole, tenant: Tenant):
    console = new_console()
    console.watch.expect_status(401)
    page = console.open()
    page.get_by_label("API key").fill(tenant.operator_key)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    secret = tenant.operator_key.split("_", 1)[1]
    kept = page.evaluate(
        "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, document.body.innerHTML])"
    )
    assert secret not in kept
    page.reload()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def test_a_deep_link_asks_for_a_key_without_an_error_and_then_opens(new_console: NewConsole, tenant: Tenant):
    console = new_console()
    console.watch.expect_status(401)
    page = console.open("#/adapters/uppercase")
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_label("API key").fill(tenant.operator_key)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="uppercase", level=1)).to_be_visible()


def test_a_wrong_key_shows_an_error_and_is_cleared(new_console: NewConsole):
    console = new_console()
    console.watch.expect_status(401)
    page = console.open()
    page.get_by_label("API key").fill("ls-aaaaaaaa_" + "a" * 52)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_label("API key")).to_have_value("")


def test_the_login_link_command_names_this_server(new_console: NewConsole):
    console = new_console()
    console.watch.expect_status(401)
    console.page.goto(f"{console.url}/ui/")
    expect(console.page.locator(".login .command code")).to_have_text(f"loraserve ui login --url {console.url}")


def test_an_inference_key_is_refused_with_the_roles_that_may_log_in(new_console: NewConsole, tenant: Tenant):
    console = new_console()
    console.watch.expect_status(401)
    console.watch.expect_status(403)
    page = console.open()
    page.get_by_label("API key").fill(tenant.key("infer"))
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("role viewer, operator or admin")


def test_a_login_link_works_once_and_disappears_from_the_address_bar_and_history(
    new_console: NewConsole, admin: httpx.Client, tenant: Tenant
):
    key_id = tenant.operator_key.removeprefix("ls-").split("_", 1)[0]
    token = admin.post("/v1/session/links", json={"key_id": key_id}).json()["token"]
    console = new_console()
    page = console.open(f"#/login/{token}")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert token not in page.url
    page.go_back()
    page.go_forward()
    assert token not in page.url

    other = new_console()
    other.watch.expect_status(401)
    page = other.open(f"#/login/{token}")
    expect(page.get_by_role("button", name="Log in")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("already used")


def test_a_login_link_works_in_a_tab_that_shows_the_login_form(
    new_console: NewConsole, admin: httpx.Client, tenant: Tenant
):
    key_id = tenant.operator_key.removeprefix("ls-").split("_", 1)[0]
    token = admin.post("/v1/session/links", json={"key_id": key_id}).json()["token"]
    console = new_console()
    console.watch.expect_status(401)
    page = console.open()
    expect(page.get_by_label("API key")).to_be_visible()
    # Only the fragment changes: the browser loads nothing.
    page.evaluate("(fragment) => { location.hash = fragment; }", f"#/login/{token}")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert token not in page.url


@pytest.mark.parametrize(("is_of_all", "status"), [(True, 404), (False, 403)])
def test_a_remembered_tenant_that_is_missing_or_forbidden_is_forgotten(
    new_console: NewConsole, tenant: Tenant, admin_secret: str, is_of_all: bool, status: int
):
    console = new_console()
    console.start_session(admin_secret if is_of_all else tenant.operator_key)
    console.watch.expect_status(status)
    page = console.open("#/adapters")
    page.evaluate("sessionStorage.setItem('tenant', 'gone')")
    page.reload()
    expect(page.get_by_test_id("adapter-row").first).to_be_visible()
    shown = "default" if is_of_all else tenant.name
    console.toast(f"You can no longer act for tenant gone. Now showing tenant {shown}.")
    assert page.evaluate("sessionStorage.getItem('tenant')") is None


def test_a_remembered_tenant_that_is_missing_does_not_block_the_login(new_console: NewConsole, admin_secret: str):
    console = new_console()
    console.watch.expect_status(401)
    console.watch.expect_status(404)
    page = console.open("#/adapters")
    page.evaluate("sessionStorage.setItem('tenant', 'gone')")
    page.reload()
    page.get_by_label("API key").fill(admin_secret)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_test_id("adapter-row").first).to_be_visible()
    console.toast("You can no longer act for tenant gone.")


def test_logging_out_ends_the_session_on_the_server(new_console: NewConsole, tenant: Tenant):
    console = new_console()
    console.start_session(tenant.operator_key)
    page = console.open()
    (cookie,) = page.context.cookies()
    assert cookie.get("httpOnly") is True
    assert cookie.get("sameSite") == "Strict"
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    stolen = {cookie.get("name", ""): cookie.get("value", "")}
    assert httpx.get(f"{console.url}/v1/session", cookies=stolen).status_code == 401


def test_a_failed_logout_says_that_the_user_is_still_logged_in(new_console: NewConsole, tenant: Tenant):
    console = new_console()
    console.start_session(tenant.operator_key)
    console.watch.expect_no_answer()
    page = console.open("#/settings")
    page.route("**/v1/session", lambda route: route.abort())
    page.get_by_role("button", name="Log out").click()
    console.toast("You are still logged in.")


def test_logging_out_in_one_tab_shows_the_login_in_the_others(new_console: NewConsole, tenant: Tenant):
    console = new_console()
    console.start_session(tenant.operator_key)
    console.watch.expect_status(401)
    page = console.open("#/live")
    tab = page.context.new_page()
    tab.goto(f"{console.url}/ui/")
    tab.get_by_role("button", name="Log out").click()
    expect(tab.get_by_label("API key")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_visible()


def test_a_tab_switches_tenant_after_another_tab_logs_in_with_a_different_key(
    new_console: NewConsole, admin: httpx.Client, tenant: Tenant, admin_secret: str
):
    tenant.add("mine", ADAPTER_DIR / "uppercase")
    key_id = admin_secret.removeprefix("ls-").split("_", 1)[0]
    token = admin.post("/v1/session/links", json={"key_id": key_id}).json()["token"]
    console = new_console()
    console.start_session(tenant.operator_key)
    page = console.open("#/adapters")
    expect(page.get_by_role("link", name="mine")).to_be_visible()
    tab = page.context.new_page()
    tab.goto(f"{console.url}/ui/#/login/{token}")
    expect(tab.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.get_by_label("Tenant")).to_have_value("default")
    expect(page.get_by_role("link", name="mine")).to_have_count(0)
    # Sent with the new session's token, so the server does not refuse it.
    page.get_by_label("Tenant").select_option(tenant.name)
    page.get_by_role("checkbox", name="Select mine").check()
    page.get_by_role("button", name="Disable").click()
    console.toast("Disabled mine.")


def test_a_tab_keeps_typed_text_if_the_same_key_logs_in_in_another_tab(new_console: NewConsole, tenant: Tenant):
    console = new_console()
    console.start_session(tenant.operator_key)
    # The other tab shows its login first.
    console.watch.expect_status(401)
    page = console.open("#/playground")
    page.get_by_test_id("prompt").fill("half a prom")
    tab = page.context.new_page()
    tab.goto(f"{console.url}/ui/")
    expect(tab.get_by_role("heading", name="Overview")).to_be_visible()
    with page.expect_response("**/v1/session"):
        end_session(tab, console.url)
        tab.reload()
        log_in(tab, tenant.operator_key)
    expect(page.get_by_test_id("prompt")).to_have_value("half a prom")
    page.get_by_test_id("prompt").press_sequentially("pt")
    expect(page.get_by_test_id("prompt")).to_have_value("half a prompt")


def end_session(page: Page, url: str) -> None:
    """Ends the session on the server only, as if it had expired."""
    (cookie,) = page.context.cookies()
    cookies = {cookie.get("name", ""): cookie.get("value", "")}
    csrf = httpx.get(f"{url}/v1/session", cookies=cookies).json()["csrf"]
    headers = {"x-csrf-token": csrf, "origin": url}
    assert httpx.delete(f"{url}/v1/session", cookies=cookies, headers=headers).is_success


def log_in(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()


def test_typed_text_survives_the_end_of_a_session_if_the_same_key_logs_in_again(
    new_console: NewConsole, tenant: Tenant
):
    key = tenant.key("admin")
    console = new_console()
    console.start_session(key)
    console.watch.expect_status(401)
    page = console.open("#/access/keys")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("long and well considered")
    end_session(page, console.url)
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_text("Your session has ended. Log in with the same key")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_focused()
    expect(dialog).to_have_count(0)
    log_in(page, key)
    expect(dialog.get_by_text("session has ended")).to_have_count(0)
    expect(dialog.get_by_label("Name", exact=True)).to_have_value("long and well considered")
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_test_id("secret")).to_be_visible()
    expect(page.get_by_test_id("key-row").filter(has_text="long and well considered")).to_be_visible()


def test_typed_text_is_discarded_after_the_end_of_a_session_if_another_key_logs_in(
    new_console: NewConsole, tenant: Tenant
):
    console = new_console()
    console.start_session(tenant.operator_key)
    console.watch.expect_status(401)
    page = console.open("#/playground")
    page.get_by_test_id("prompt").fill("mine alone")
    end_session(page, console.url)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()
    log_in(page, tenant.key("operator"))
    expect(page.get_by_test_id("prompt")).to_have_value("")


def test_typed_text_is_discarded_on_logout(new_console: NewConsole, tenant: Tenant):
    console = new_console()
    console.start_session(tenant.operator_key)
    console.watch.expect_status(401)
    page = console.open("#/playground")
    page.get_by_test_id("prompt").fill("typed here")
    tab = page.context.new_page()
    tab.goto(f"{console.url}/ui/")
    tab.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.locator("textarea")).to_have_count(0)
    log_in(page, tenant.operator_key)
    expect(page.get_by_test_id("prompt")).to_have_value("")


def test_revoking_a_key_ends_its_sessions(new_console: NewConsole, admin: httpx.Client, tenant: Tenant):
    key = tenant.key("viewer")
    console = new_console()
    console.start_session(key)
    console.watch.expect_status(401)
    page = console.open("#/adapters")
    expect(page.get_by_role("heading", name="Adapters")).to_be_visible()
    assert admin.delete(f"/v1/keys/{key.removeprefix('ls-').split('_', 1)[0]}").status_code < 300
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible()


@pytest.mark.parametrize(
    ("role", "shown"),
    [
        ("viewer", ["Overview", "Adapters", "Live", "Requests"]),
        ("operator", ["Overview", "Adapters", "Upload", "Playground", "Live", "Requests"]),
        (
            "admin",
            ["Overview", "Adapters", "Upload", "Playground", "Live", "Requests", "Tenants & keys"],
        ),
    ],
)
def test_the_navigation_shows_only_what_the_role_may_see(
    new_console: NewConsole, tenant: Tenant, role: str, shown: list[str]
):
    console = new_console()
    console.start_session(tenant.key(role))
    page = console.open("#/adapters")
    items = page.get_by_role("navigation", name="Main").get_by_role("link")
    expect(items).to_have_text([re.compile("loraserve"), *shown])


def test_only_an_admin_of_all_tenants_sees_the_settings(new_console: NewConsole, tenant: Tenant, admin_secret: str):
    console = new_console()
    console.start_session(tenant.key("admin"))
    page = console.open("#/settings")
    expect(page.get_by_test_id("no-permission")).to_contain_text("Settings requires the admin role for all tenants")
    console = new_console()
    console.start_session(admin_secret)
    page = console.open("#/settings")
    expect(page.get_by_role("navigation", name="Main").get_by_role("link", name="Settings")).to_be_visible()
    expect(page.get_by_test_id("setting").first).to_be_visible()


def test_a_viewer_sees_an_adapter_without_controls_that_change_it(new_console: NewConsole, tenant: Tenant):
    tenant.add("watched", ADAPTER_DIR / "uppercase")
    console = new_console()
    console.start_session(tenant.key("viewer"))
    page = console.open("#/adapters/watched")
    expect(page.get_by_test_id("version-1")).to_be_visible()
    for name in ("Add an alias", "New version", "Make it live", "Delete version", "More actions", "Roll back"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)
    expect(page.get_by_role("link", name="Try it")).to_have_count(0)
    page = console.open("#/adapters")
    expect(page.get_by_role("checkbox")).to_have_count(0)
    expect(page.get_by_role("link", name="Upload")).to_have_count(0)


def test_a_view_that_the_role_may_not_see_reports_missing_permission(console: Console):
    page = console.open("#/settings")
    expect(page.get_by_test_id("no-permission")).to_be_visible()

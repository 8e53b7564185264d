"""Tenants and keys, managed by an admin of the whole server."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import APIResponse, Browser, Locator, Route, expect

from tests.browser.conftest import NewConsole, watched_console
from tests.browser.console import Console
from tests.browser.tenant import Tenant
from tests.support.demo_questions import ADAPTER_DIR
from tests.support.server_process import serve_fake, stop, wait_until

OLDER = """
for (const name of ["toLocaleString", "toLocaleTimeString"]) {
  const now = Date.prototype[name];
  Date.prototype[name] = function (locale, options = {}) {
    const { hour12, ...others } = options;
    return now.call(this, locale, hour12 === false ? { ...others, hourCycle: "h24" } : options);
  };
}
"""
"""Makes `hour12: false` behave as in browsers before 2023, in languages with a 12-hour clock."""
RENEWED_MS = 10_000
"""Interval after which the list of keys is requested again."""


@pytest.fixture
def root(new_console: NewConsole, admin_secret: str) -> Console:
    """Logged in as admin of all tenants, with lists that do not refresh themselves."""
    console = new_console()
    console.never_refresh()
    console.start_session(admin_secret)
    return console


def key_row(console: Console, name: str) -> Locator:
    row = console.page.get_by_test_id("key-row").filter(has_text=name)
    expect(row).to_be_visible()
    return row


def open_keys(console: Console, tenant: Tenant) -> None:
    page = console.open("#/access")
    page.get_by_role("button", name=f"Keys of {tenant.name}:").click()
    expect(page.get_by_role("heading", name="Keys")).to_be_visible()
    expect(page.get_by_test_id("key-row").first).to_be_visible()


def make_key(console: Console, name: str, role: str = "infer", *, every_tenant: bool = False) -> str:
    """Creates a key through the dialog and returns its secret as shown."""
    page = console.page
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill(name)
    dialog.locator(f"input[value={role}]").check()
    for_all = dialog.get_by_label("For all tenants")
    if every_tenant or for_all.is_visible():
        for_all.set_checked(every_tenant)
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_test_id("secret")).to_be_visible()
    return page.get_by_test_id("secret").locator("code").inner_text()


def status_of(url: str, key: str) -> int:
    return httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def test_a_key_is_shown_once_and_works(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    secret = make_key(root, "for the tests")
    assert re.fullmatch(r"ls-[a-z2-7]{8}_\S{40,}", secret)
    assert status_of(root.url, secret) == 200
    root.page.get_by_test_id("secret").get_by_role("button", name="Copy the key").click()
    assert root.page.evaluate("navigator.clipboard.readText()") == secret
    root.page.get_by_role("button", name="Done").click()
    row = key_row(root, "for the tests")
    assert secret not in root.page.content()
    expect(row).to_contain_text("infer")
    assert secret not in root.page.evaluate("JSON.stringify([localStorage, sessionStorage, location.href])")
    root.page.reload()
    key_row(root, "for the tests")
    assert secret not in root.page.content()


@contextmanager
def open_console(browser: Browser, data_dir: Path, *, width: int = 1280, theme: str = "light") -> Iterator[Console]:
    """The console of a server without keys, on which everyone may do everything until the first key is created."""
    with serve_fake(data_dir) as server:
        with watched_console(browser, server.url, width, 844, theme) as console:
            # For requests sent while the key was being created, or after a key that may not log in.
            console.watch.expect_status(401)
            console.open("#/access/keys?of=all")
            yield console
            console.watch.check()
            console.page.goto("about:blank")
        stop(server)


@pytest.mark.parametrize(("role", "every_tenant"), [("admin", True), ("operator", False)])
def test_the_first_key_stays_on_screen_and_its_creator_is_logged_in_with_it(
    browser: Browser, tmp_path: Path, role: str, every_tenant: bool
):
    with open_console(browser, tmp_path / "data") as console:
        page = console.page
        secret = make_key(console, "the first", role, every_tenant=every_tenant)
        assert status_of(console.url, secret) == 200
        console.toast("The server now requires a key")
        expect(page.get_by_role("navigation", name="Main")).to_be_visible()
        if role == "admin":
            expect(key_row(console, "the first")).to_contain_text("all tenants")
        else:
            expect(page.get_by_test_id("no-permission")).to_be_visible()
        page.get_by_role("link", name="Adapters").click()
        expect(page.get_by_role("heading", name="Adapters", exact=True)).to_be_visible()
        expect(page.get_by_test_id("secret")).to_contain_text(secret)
        page.get_by_role("button", name="Done").click()
        assert secret not in page.content()
        page.reload()
        expect(page.get_by_role("heading", name="Adapters", exact=True)).to_be_visible()
        assert secret not in page.evaluate("JSON.stringify([localStorage, sessionStorage, location.href])")


def test_the_first_key_defaults_to_an_admin_of_all_tenants_and_other_choices_show_a_warning(
    browser: Browser, tmp_path: Path
):
    with open_console(browser, tmp_path / "data") as console:
        console.page.get_by_role("button", name="New key").click()
        dialog = console.page.get_by_role("dialog")
        admin, for_all = dialog.locator("input[value=admin]"), dialog.get_by_label("For all tenants")
        expect(admin).to_be_checked()
        expect(for_all).to_be_checked()
        warning = dialog.get_by_role("alert")
        expect(warning).to_have_count(0)
        for_all.uncheck()
        expect(warning).to_contain_text("cannot create keys for all tenants")
        for_all.check()
        dialog.locator("input[value=infer]").check()
        expect(warning).to_contain_text("cannot create keys for all tenants")


@pytest.mark.parametrize("width", [390, 1280])
def test_a_first_key_that_may_not_log_in_is_shown_above_the_login(browser: Browser, tmp_path: Path, width: int):
    with open_console(browser, tmp_path / "data", width=width, theme="dark") as console:
        page = console.page
        secret = make_key(console, "for requests only")
        expect(page.get_by_role("button", name="Log in")).to_be_visible()
        shown = page.get_by_test_id("secret")
        expect(shown).to_contain_text("every request needs a key")
        copy = shown.get_by_role("button", name="Copy the key")
        expect(copy).to_be_in_viewport(ratio=1)
        copy.click()
        assert page.evaluate("navigator.clipboard.readText()") == secret
        assert status_of(console.url, secret) == 200
        page.get_by_role("button", name="Done").click()
        assert secret not in page.content()


def test_a_401_for_a_request_sent_before_the_login_does_not_end_the_session(browser: Browser, tmp_path: Path):
    with open_console(browser, tmp_path / "data") as console:
        page = console.page
        held: list[Route] = []
        page.route("**/v1/usage?*", lambda route: held.append(route) if not held else route.continue_())
        with page.expect_request("**/v1/usage?*"):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        make_key(console, "the first", "admin", every_tenant=True)
        key_row(console, "the first")
        with page.expect_response("**/v1/usage?*"):
            held[0].fulfill(status=401, json={})
        page.get_by_role("link", name="Adapters").click()
        expect(page.get_by_role("heading", name="Adapters", exact=True)).to_be_visible()


def test_logging_out_leaves_no_new_secret_on_the_screen(root: Console, tenant: Tenant):
    root.watch.expect_status(401)
    open_keys(root, tenant)
    secret = make_key(root, "left behind")
    root.page.get_by_role("button", name="Log out").click()
    expect(root.page.get_by_role("button", name="Log in")).to_be_visible()
    assert secret not in root.page.content()


def test_a_key_may_be_limited_to_adapters_days_and_rates(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    page = root.page
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("narrow")
    dialog.get_by_label("Only these adapters").fill("uppercase, reverse")
    dialog.get_by_label("Expires in (days)").fill("7")
    dialog.get_by_text("Limits").click()
    dialog.get_by_label("Requests per minute").fill("30")
    dialog.get_by_role("button", name="Create").click()
    row = key_row(root, "narrow")
    expect(row).to_contain_text("uppercase, reverse")
    expect(row).to_contain_text("30 requests per minute")
    (key,) = [
        item
        for item in tenant.admin.get("/v1/keys", headers={"x-tenant": tenant.name}).json()["data"]
        if item["name"] == "narrow"
    ]
    assert key["adapters"] == ["uppercase", "reverse"]
    assert key["expires_at"] is not None


def lose_answer(route: Route) -> None:
    """Loses the response to a change that the server has made."""
    if route.request.method == "GET":
        route.continue_()
        return
    route.fetch()
    route.abort()


def test_a_retry_after_a_lost_response_creates_the_key_once_and_shows_its_secret(root: Console, tenant: Tenant):
    root.watch.expect_no_answer()
    open_keys(root, tenant)
    page = root.page
    page.route("**/v1/keys", lose_answer)
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("unheard")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_role("alert")).to_contain_text("may have been created anyway")
    root.let_through("**/v1/keys")
    dialog.get_by_role("button", name="Create").click()
    secret = page.get_by_test_id("secret").locator("code").inner_text()
    assert status_of(root.url, secret) == 200
    expect(key_row(root, "unheard")).not_to_contain_text("old secret valid")


def test_a_retry_with_other_fields_after_a_lost_response_creates_another_key(root: Console, tenant: Tenant):
    root.watch.expect_no_answer()
    open_keys(root, tenant)
    page = root.page
    page.route("**/v1/keys", lose_answer)
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("the one")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    root.let_through("**/v1/keys")
    dialog.get_by_label("Name", exact=True).fill("another")
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_test_id("secret")).to_be_visible()
    key_row(root, "the one")
    key_row(root, "another")


def test_a_second_rotation_within_the_hour_warns_which_secret_it_ends(root: Console, tenant: Tenant):
    first = tenant.key("infer", name="rotated twice")
    open_keys(root, tenant)
    page = root.page
    rotate = key_row(root, "rotated twice").get_by_role("button", name="Rotate")
    rotate.click()
    root.toast("Key rotated.")
    second = page.get_by_test_id("secret").locator("code").inner_text()
    expect(key_row(root, "rotated twice")).to_contain_text("old secret valid")
    rotate.click()
    dialog = root.dialog("Rotate rotated twice again?")
    expect(dialog).to_contain_text("ends it at once")
    dialog.get_by_role("button", name="Cancel").click()
    assert status_of(root.url, first) == 200
    rotate.click()
    dialog.get_by_role("button", name="Rotate").click()
    expect(page.get_by_test_id("secret").locator("code")).not_to_have_text(second)
    third = page.get_by_test_id("secret").locator("code").inner_text()
    assert [status_of(root.url, secret) for secret in (first, second, third)] == [401, 200, 200]


def test_rotating_shows_the_new_secret_and_keeps_the_old_one_valid(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    old = make_key(root, "rotating")
    root.page.get_by_role("button", name="Done").click()
    key_row(root, "rotating").get_by_role("button", name="Rotate").click()
    root.toast("Key rotated.")
    new = root.page.get_by_test_id("secret").locator("code").inner_text()
    assert new != old
    assert (status_of(root.url, old), status_of(root.url, new)) == (200, 200)


def test_a_double_click_rotates_once_so_that_the_old_secret_still_works(root: Console, tenant: Tenant):
    old = tenant.key("infer", name="clicked twice")
    open_keys(root, tenant)
    key_row(root, "clicked twice").get_by_role("button", name="Rotate").dblclick()
    root.toast("Key rotated.")
    expect(key_row(root, "clicked twice")).to_contain_text("old secret valid")
    new = root.page.get_by_test_id("secret").locator("code").inner_text()
    assert (status_of(root.url, old), status_of(root.url, new)) == (200, 200)


def test_a_key_that_someone_else_just_rotated_is_not_rotated_again(root: Console, tenant: Tenant):
    old = tenant.key("infer", name="theirs")
    root.watch.expect_status(412)
    open_keys(root, tenant)
    key_row(root, "theirs")
    key_id = old.removeprefix("ls-").split("_", 1)[0]
    assert tenant.admin.post(f"/v1/keys/{key_id}/rotate", json={"grace_s": 3600}).status_code == 201
    key_row(root, "theirs").get_by_role("button", name="Rotate").click()
    expect(key_row(root, "theirs")).to_contain_text("old secret valid")
    assert status_of(root.url, old) == 200
    expect(root.page.get_by_test_id("secret")).to_have_count(0)


def test_a_new_secret_can_be_copied_on_a_phone_wherever_its_key_is_in_the_list(
    new_console: NewConsole, tenant: Tenant, admin_secret: str
):
    for number in range(12):
        tenant.key("infer", name=f"number {number}")
    phone = new_console(width=390, height=844)
    phone.start_session(admin_secret)
    open_keys(phone, tenant)
    key_row(phone, "number 0").get_by_role("button", name="Rotate").click()
    copy = phone.page.get_by_test_id("secret").get_by_role("button", name="Copy the key")
    expect(copy).to_be_in_viewport(ratio=1)


def test_a_change_is_shown_although_an_older_list_arrives_after_it(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    make_key(root, "resting")
    key_row(root, "resting")
    held: list[tuple[Route, APIResponse]] = []

    def hold_first(route: Route) -> None:
        if held:
            route.continue_()
        else:
            held.append((route, route.fetch()))

    root.page.route("**/v1/keys?*", hold_first)
    with root.page.expect_request("**/v1/keys?*"):
        root.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    key_row(root, "resting").get_by_role("button", name="Suspend").click()
    root.toast("Key suspended.")
    ((route, older),) = held
    route.fulfill(response=older)
    expect(key_row(root, "resting")).to_contain_text("suspended")


def test_suspending_a_key_refuses_it_until_it_is_resumed(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    secret = make_key(root, "resting")
    key_row(root, "resting").get_by_role("button", name="Suspend").click()
    root.toast("Key suspended.")
    expect(key_row(root, "resting")).to_contain_text("suspended")
    assert status_of(root.url, secret) in (401, 403)
    key_row(root, "resting").get_by_role("button", name="Resume").click()
    expect(key_row(root, "resting")).to_contain_text("active")
    assert status_of(root.url, secret) == 200


def test_revoking_a_key_requires_typing_its_name_and_ends_it(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    secret = make_key(root, "doomed")
    key_row(root, "doomed").get_by_role("button", name="Revoke").click()
    dialog = root.dialog("Revoke doomed?")
    expect(dialog.get_by_role("button", name="Revoke")).to_be_disabled()
    dialog.get_by_label("Type doomed to confirm").fill("doomed")
    dialog.get_by_role("button", name="Revoke").click()
    root.toast("Key revoked.")
    assert status_of(root.url, secret) == 401


def test_a_key_whose_name_has_invisible_spaces_is_revoked_by_typing_the_visible_name(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    secret = make_key(root, "on  the phone ")
    root.page.get_by_role("button", name="Done").click()
    key_row(root, "on the phone").get_by_role("button", name="Revoke").click()
    dialog = root.page.get_by_role("dialog")
    dialog.get_by_role("textbox").fill("on the phone")
    dialog.get_by_role("button", name="Revoke").click()
    root.toast("Key revoked.")
    assert status_of(root.url, secret) == 401


def test_changed_key_limits_are_enforced(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    secret = make_key(root, "shrinking")
    key_row(root, "shrinking").get_by_role("button", name="Edit").click()
    dialog = root.dialog("Edit shrinking")
    dialog.get_by_label("Requests per minute").fill("0")
    dialog.get_by_label("Only these adapters").fill("uppercase")
    dialog.get_by_role("button", name="Save").click()
    root.toast("Updated shrinking.")
    expect(key_row(root, "shrinking")).to_contain_text("0 requests per minute")
    expect(key_row(root, "shrinking")).to_contain_text("uppercase")
    headers = {"authorization": f"Bearer {secret}"}
    body = {"model": "uppercase", "prompt": "hello", "max_tokens": 1}
    assert httpx.post(f"{root.url}/v1/completions", json=body, headers=headers).status_code == 429


def test_all_keys_are_listed_with_their_tenants(root: Console, tenant: Tenant, admin: httpx.Client):
    # Not the server's first key: the keys of other tests are newer and fill more than a page.
    created = admin.post("/v1/keys", json={"role": "viewer", "tenant": "*"}).json()
    tenant.key("infer", name="own")
    open_keys(root, tenant)
    own = key_row(root, "own")
    expect(own).not_to_contain_text(tenant.name)
    of_all = root.page.get_by_test_id("key-row").filter(has_text="all tenants")
    expect(of_all).to_have_count(0)
    root.page.get_by_role("button", name="All keys").click()
    expect(of_all.filter(has_text=created["id"])).to_have_count(1)
    expect(own.filter(has_text=tenant.name)).to_have_count(1)
    expect(root.page.get_by_role("heading", name="Keys", exact=True)).to_be_visible()


def test_the_request_count_of_another_tenants_key_links_to_its_usage(
    root: Console, tenant: Tenant, admin: httpx.Client
):
    secret = tenant.key("infer", name="counted")
    body = {"model": "uppercase", "prompt": "hello", "max_tokens": 2}
    headers = {"authorization": f"Bearer {secret}"}
    assert httpx.post(f"{root.url}/v1/completions", json=body, headers=headers).status_code == 200
    page = root.open("#/access/keys?of=all")
    number = key_row(root, "counted").get_by_role("link", name="Usage of counted")
    expect(number).to_contain_text(re.compile(r"1$"))
    number.click()
    expect(page.get_by_test_id("usage-row")).to_contain_text(tenant.name)


def test_a_keys_expiry_can_be_removed(root: Console, tenant: Tenant):
    tenant.key("infer", name="brief", expires_in_s=86_400)
    tenant.key("infer", name="endless")

    def expiry() -> float | None:
        listed = tenant.admin.get("/v1/keys", headers={"x-tenant": tenant.name}).json()["data"]
        return next(key["expires_at"] for key in listed if key["name"] == "brief")

    before = expiry()
    open_keys(root, tenant)
    row = key_row(root, "brief")
    dialog = root.page.get_by_role("dialog")
    row.get_by_role("button", name="Edit").click()
    dialog.get_by_label("Name", exact=True).fill("brief")
    dialog.get_by_role("button", name="Save").click()
    root.toast("Updated brief.")
    assert expiry() == before
    row.get_by_role("button", name="Edit").click()
    dialog.get_by_label("Expires in (days)").fill("3")
    dialog.get_by_label("Never expires").check()
    expect(dialog.get_by_label("Expires in (days)")).to_be_disabled()
    dialog.get_by_role("button", name="Save").click()
    expect(row).to_contain_text("never")
    assert expiry() is None
    key_row(root, "endless").get_by_role("button", name="Edit").click()
    expect(dialog.get_by_label("Expires in (days)")).to_be_visible()
    expect(dialog.get_by_label("Never expires")).to_have_count(0)


def test_an_expired_key_is_marked_as_expired(new_console: NewConsole, tenant: Tenant, admin_secret: str):
    secret = tenant.key("infer", name="brief", expires_in_s=1)
    console = new_console()
    console.start_session(admin_secret)
    console.page.clock.install()
    open_keys(console, tenant)
    wait_until(lambda: status_of(console.url, secret) == 401, "the key has ended")
    console.page.clock.fast_forward(RENEWED_MS)
    expect(key_row(console, "brief")).to_contain_text("expired")


def test_midnight_is_shown_as_00_in_older_browsers_too(root: Console, tenant: Tenant):
    root.page.add_init_script(OLDER)
    root.page.goto("about:blank")
    midnight = root.page.evaluate("new Date(2026, 0, 1).getTime() / 1000")

    def made_at_midnight(route: Route) -> None:
        page = route.fetch().json()
        route.fulfill(json={**page, "data": [{**key, "created_at": midnight} for key in page["data"]]})

    root.page.route("**/v1/keys?*", made_at_midnight)
    open_keys(root, tenant)
    made = root.page.get_by_test_id("key-row").first.get_by_text("created")
    expect(made).to_have_attribute("title", re.compile(r"\b00:00:00\b"))


def test_keys_can_be_created_and_copied_over_plain_http(root: Console, tenant: Tenant):
    # APIs that a browser does not offer to a page from another machine without HTTPS.
    root.page.add_init_script(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
        "Object.defineProperty(crypto, 'randomUUID', { value: undefined });"
        "document.addEventListener('copy', () => { window.copied = String(document.getSelection()) });"
    )
    open_keys(root, tenant)
    secret = make_key(root, "from afar")
    root.page.get_by_test_id("secret").get_by_role("button", name="Copy the key").click()
    expect(root.page.get_by_test_id("secret").get_by_role("button", name="Copied")).to_be_visible()
    assert root.page.evaluate("window.copied") == secret


def test_suspending_a_tenant_refuses_its_requests_until_that_is_undone(root: Console, tenant: Tenant):
    page = root.open("#/access")
    row = page.get_by_test_id("tenant-row").filter(has=page.get_by_text(tenant.name, exact=True))
    row.get_by_role("button", name="Suspend").click()
    dialog = root.dialog(f"Suspend {tenant.name}?")
    expect(dialog.get_by_role("button", name="Suspend")).to_be_disabled()
    dialog.get_by_label(f"Type {tenant.name} to confirm").fill(tenant.name)
    dialog.get_by_role("button", name="Suspend").click()
    toast = root.toast(f"Suspended {tenant.name}.")
    assert status_of(root.url, tenant.operator_key) in (401, 403)
    toast.get_by_role("button", name="Undo").click()
    root.toast("Undone.")
    expect(row).to_contain_text("active")
    assert status_of(root.url, tenant.operator_key) == 200


def test_a_tenant_is_created_edited_suspended_and_resumed(root: Console, tenant: Tenant):
    page = root.open("#/access")
    page.get_by_role("button", name="New tenant").click()
    dialog = root.dialog("New tenant")
    name = f"made-beside-{tenant.name}"
    dialog.get_by_label("Name", exact=True).fill(name)
    dialog.get_by_label("Requests per minute").fill("60")
    dialog.get_by_role("button", name="Create").click()
    root.toast(f"Created {name}.")
    row = page.get_by_test_id("tenant-row").filter(has_text=name)
    expect(row).to_contain_text("60 requests per minute")
    row.get_by_role("button", name="Edit").click()
    dialog = root.dialog(f"Edit {name}")
    dialog.get_by_label("Weight").fill("3")
    dialog.get_by_role("button", name="Save").click()
    root.toast(f"Updated {name}.")
    row.get_by_role("button", name="Suspend").click()
    dialog = root.dialog(f"Suspend {name}?")
    dialog.get_by_label(f"Type {name} to confirm").fill(name)
    dialog.get_by_role("button", name="Suspend").click()
    expect(row).to_contain_text("suspended")
    row.get_by_role("button", name="Resume").click()
    expect(row).to_contain_text("active")
    found = tenant.admin.get(f"/v1/tenants/{name}").json()
    assert found["weight"] == 3
    assert found["limits"]["requests_per_min"] == 60


def test_a_weight_can_be_typed_without_its_leading_zero(root: Console, tenant: Tenant, admin: httpx.Client):
    page = root.open("#/access")
    row = page.get_by_test_id("tenant-row").filter(has_text=tenant.name)
    row.get_by_role("button", name="Edit").click()
    weight = root.dialog(f"Edit {tenant.name}").get_by_label("Weight")
    weight.press("ControlOrMeta+a")
    page.keyboard.type(".5")
    root.page.get_by_role("button", name="Save").click()
    root.toast(f"Updated {tenant.name}.")
    assert admin.get(f"/v1/tenants/{tenant.name}").json()["weight"] == 0.5


def test_a_tenant_that_someone_else_just_changed_is_not_overwritten(root: Console, tenant: Tenant):
    root.watch.expect_status(412)
    page = root.open("#/access")
    page.get_by_test_id("tenant-row").filter(has_text=re.compile(f"^{tenant.name}active")).get_by_role(
        "button", name="Edit"
    ).click()
    dialog = root.dialog(f"Edit {tenant.name}")
    assert tenant.admin.patch(f"/v1/tenants/{tenant.name}", json={"description": "theirs"}).is_success
    dialog.get_by_label("Description").fill("mine")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Someone else changed this")
    assert tenant.admin.get(f"/v1/tenants/{tenant.name}").json()["description"] == "theirs"


def test_the_tenant_picker_selects_whose_adapters_are_shown(root: Console, tenant: Tenant):
    tenant.add("of-its-own", ADAPTER_DIR / "uppercase")
    page = root.open("#/adapters")
    own = page.get_by_test_id("adapter-row").filter(has_text="of-its-own")
    page.get_by_label("Tenant").select_option(tenant.name)
    expect(own).to_be_visible()
    page.get_by_label("Tenant").select_option("default")
    expect(own).to_have_count(0)
    page.get_by_label("Tenant").select_option(tenant.name)
    page.reload()
    expect(page.get_by_label("Tenant")).to_have_value(tenant.name)
    expect(own).to_be_visible()


def test_the_tenant_picker_offers_a_new_tenant_at_once(root: Console, tenant: Tenant):
    name = f"new-{tenant.name}"
    page = root.open("#/access")
    options = page.get_by_label("Tenant").get_by_role("option")
    expect(options.filter(has_text=tenant.name)).to_have_count(1)
    page.get_by_role("button", name="New tenant").click()
    dialog = root.dialog("New tenant")
    dialog.get_by_label("Name").fill(name)
    dialog.get_by_role("button", name="Create").click()
    expect(options.filter(has_text=name)).to_have_count(1)


def test_the_tenant_picker_shows_a_selected_tenant_that_is_missing_from_its_list(root: Console, tenant: Tenant):
    page = root.open("#/adapters")
    page.get_by_label("Tenant").select_option(tenant.name)
    page.route("**/v1/tenants?limit=500", lambda route: route.fulfill(json={"data": [{"id": "default"}]}))
    with page.expect_response("**/v1/tenants?limit=500"):
        page.reload()
    expect(page.get_by_label("Tenant").get_by_role("option")).to_have_count(2)
    expect(page.get_by_label("Tenant")).to_have_value(tenant.name)

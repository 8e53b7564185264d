"""Tenants and keys, by an admin of the whole server."""

import re

import httpx
import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import NewConsole
from tests.browser.console import Console
from tests.browser.tenant import Tenant


@pytest.fixture
def root(new_console: NewConsole, admin_secret: str) -> Console:
    """As admin of all tenants."""
    console = new_console()
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


def make_key(console: Console, name: str, role: str = "infer") -> str:
    """Its secret, as it is shown."""
    page = console.page
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill(name)
    dialog.locator(f"input[value={role}]").check()
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


def test_a_key_may_be_limited_to_adapters_days_and_rates(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    page = root.page
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("narrow")
    dialog.get_by_label("Only these adapters").fill("uppercase, reverse")
    dialog.get_by_label("Ends after days").fill("7")
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


def test_rotating_shows_the_new_key_once_and_lets_the_old_one_finish(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    old = make_key(root, "rotating")
    root.page.get_by_role("button", name="Done").click()
    key_row(root, "rotating").get_by_role("button", name="Rotate").click()
    root.toast("Rotated")
    new = root.page.get_by_test_id("secret").locator("code").inner_text()
    assert new != old
    assert (status_of(root.url, old), status_of(root.url, new)) == (200, 200)


def test_suspending_a_key_refuses_it_until_it_is_resumed(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    secret = make_key(root, "resting")
    key_row(root, "resting").get_by_role("button", name="Suspend").click()
    root.toast("Suspended.")
    expect(key_row(root, "resting")).to_contain_text("suspended")
    assert status_of(root.url, secret) in (401, 403)
    key_row(root, "resting").get_by_role("button", name="Resume").click()
    expect(key_row(root, "resting")).to_contain_text("active")
    assert status_of(root.url, secret) == 200


def test_revoking_a_key_wants_its_name_typed_and_is_for_ever(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    secret = make_key(root, "doomed")
    key_row(root, "doomed").get_by_role("button", name="Revoke").click()
    dialog = root.dialog("Revoke doomed?")
    expect(dialog.get_by_role("button", name="Revoke")).to_be_disabled()
    dialog.get_by_label("Type doomed to confirm").fill("doomed")
    dialog.get_by_role("button", name="Revoke").click()
    root.toast("Revoked.")
    assert status_of(root.url, secret) == 401


def test_a_tenant_is_made_changed_suspended_and_resumed(root: Console, tenant: Tenant):
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
    root.toast(f"Changed {name}.")
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


def test_a_tenant_that_somebody_else_changed_meanwhile_is_not_overwritten(root: Console, tenant: Tenant):
    root.watch.expect_status(412)
    page = root.open("#/access")
    page.get_by_test_id("tenant-row").filter(has_text=re.compile(f"^{tenant.name}active")).get_by_role(
        "button", name="Edit"
    ).click()
    dialog = root.dialog(f"Edit {tenant.name}")
    assert tenant.admin.patch(f"/v1/tenants/{tenant.name}", json={"description": "theirs"}).is_success
    dialog.get_by_label("Description").fill("mine")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Somebody else changed this")
    assert tenant.admin.get(f"/v1/tenants/{tenant.name}").json()["description"] == "theirs"


def test_the_tenant_picker_says_whose_adapters_are_shown(root: Console, tenant: Tenant):
    assert tenant.http.post("/v1/adapters", json={"name": "x"}).status_code >= 400  # nothing of its own yet
    page = root.open("#/adapters")
    page.get_by_label("Tenant").select_option("many")
    expect(page.get_by_test_id("adapter-row").filter(has_text="adapter-00000")).to_be_visible()
    page.get_by_label("Tenant").select_option(tenant.name)
    expect(page.get_by_test_id("adapter-row").filter(has_text="adapter-00000")).to_have_count(0)
    page.reload()
    expect(page.get_by_label("Tenant")).to_have_value(tenant.name)

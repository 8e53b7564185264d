"""Where the focus goes after pressing a button that then disappears: never back to the top of the page."""

from pathlib import Path

from playwright.sync_api import Route, expect

from tests.browser.conftest import NewConsole
from tests.browser.console import START_MS, Console
from tests.browser.tenant import Tenant
from tests.browser.test_access import key_row, make_key, open_keys, root
from tests.browser.test_deleted_tenants import ask_to_delete, row_of
from tests.browser.test_uploads import twin
from tests.browser.test_versions import versions
from tests.support.demo_questions import ADAPTER_DIR

__all__ = ["root", "versions"]


def test_revoking_a_key_focuses_the_next_keys_button_or_the_heading_if_none_is_left(root: Console, tenant: Tenant):
    tenant.key("infer", name="first")
    tenant.key("infer", name="second")
    open_keys(root, tenant)
    revoke = root.page.get_by_test_id("key-row").get_by_role("button", name="Revoke")
    expect(revoke).to_have_count(3)
    for num_left in (2, 1, 0):
        revoke.first.focus()
        root.page.keyboard.press("Enter")
        dialog = root.page.get_by_role("dialog")
        label = dialog.locator(".field-label").inner_text()
        dialog.get_by_role("textbox").fill(label.removeprefix("Type ").removesuffix(" to confirm"))
        root.page.keyboard.press("Enter")
        expect(revoke).to_have_count(num_left)
        expect(revoke.first if num_left else root.page.get_by_role("heading", name="Keys of")).to_be_focused()


def test_suspending_and_resuming_a_key_keeps_the_focus_on_its_button(root: Console, tenant: Tenant):
    tenant.key("infer", name="paused")
    open_keys(root, tenant)
    row = key_row(root, "paused")
    row.get_by_role("button", name="Suspend").focus()
    root.page.keyboard.press("Enter")
    expect(row.get_by_role("button", name="Resume")).to_be_focused()
    root.page.keyboard.press("Enter")
    expect(row.get_by_role("button", name="Suspend")).to_be_focused()


def test_dismissing_a_new_keys_secret_focuses_the_heading(root: Console, tenant: Tenant):
    open_keys(root, tenant)
    make_key(root, "copied")
    root.page.get_by_role("button", name="Done").press("Enter")
    expect(root.page.get_by_role("heading", name="Keys of")).to_be_focused()


def test_deleting_or_restoring_a_tenant_focuses_the_next_tenants_button(root: Console, tenant: Tenant):
    other = f"{tenant.name}-b"
    assert tenant.admin.post("/v1/tenants", json={"id": other}).status_code == 201
    page = root.open("#/access")
    ask_to_delete(root, tenant.name).get_by_role("button", name="Delete").press("Enter")
    expect(row_of(page, tenant.name)).to_have_count(0)
    expect(page.get_by_role("button", name=f"Delete {other}", exact=True)).to_be_focused()
    assert tenant.admin.delete(f"/v1/tenants/{other}").is_success
    page.reload()
    row_of(page, other, deleted=True).get_by_role("button", name="Restore").press("Enter")
    expect(row_of(page, other, deleted=True)).to_have_count(0)
    expect(page.locator("[data-testid=deleted-tenant-row] button:focus")).to_have_text("Restore")


def test_undoing_a_change_returns_the_focus_to_its_button(root: Console, tenant: Tenant):
    tenant.key("infer", name="undone")
    open_keys(root, tenant)
    row = key_row(root, "undone")
    row.get_by_role("button", name="Suspend").press("Enter")
    root.toast("Key suspended.").get_by_role("button", name="Undo").press("Enter")
    root.toast("Undone.")
    expect(row.get_by_role("button", name="Suspend")).to_be_focused()


def test_the_focus_moves_between_the_send_and_stop_buttons(console: Console):
    page = console.open("#/playground")
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    page.get_by_test_id("prompt").fill("hello")
    page.get_by_role("button", name="Send").press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_focused()


def test_removing_an_alias_focuses_the_next_alias_and_then_the_heading(console: Console, versions: Tenant):
    for alias in ("staging", "tests"):
        assert versions.http.put(f"/v1/adapters/greeting/aliases/{alias}", json={"version": 1}).is_success
    page = console.open("#/adapters/greeting")
    page.get_by_role("button", name="Remove the alias staging").press("Enter")
    expect(page.get_by_role("button", name="Remove the alias tests")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="greeting@v1")).to_be_focused()


def test_an_action_that_changes_the_whole_page_focuses_its_heading(console: Console, tenant: Tenant):
    tenant.add("chosen", ADAPTER_DIR / "uppercase")
    page = console.open("#/adapters")
    page.get_by_role("checkbox", name="Select chosen").check()
    page.get_by_role("button", name="Disable").press("Enter")
    console.toast("Disabled chosen.")
    expect(page.get_by_role("heading", name="Adapters", exact=True)).to_be_focused()
    page.get_by_role("link", name="chosen").press("Enter")
    expect(page.get_by_label("More actions")).to_be_visible()
    # The view sends more requests once it knows the adapter; for a deleted one, they would return 404.
    console.settle()
    assert tenant.http.delete("/v1/adapters/chosen").is_success
    page.get_by_role("button", name="Restore").press("Enter")
    expect(page.get_by_role("link", name="Try it")).to_be_visible()
    expect(page.get_by_role("heading", name="chosen", level=1)).to_be_focused()


def test_a_button_disabled_while_it_works_gets_the_focus_back(console: Console, tenant: Tenant):
    tenant.add("fetched", ADAPTER_DIR / "uppercase")
    page = console.open("#/adapters/fetched")
    held: list[Route] = []
    page.route("**/files/adapter_config.json", lambda route: held.append(route))
    button = page.get_by_role("button", name="Download adapter_config.json")
    with page.expect_request("**/files/adapter_config.json"):
        button.press("Enter")
    expect(button).to_be_disabled()
    with page.expect_download():
        held[0].continue_()
    expect(button).to_be_focused()


def test_retrying_an_upload_keeps_the_focus_within_the_view(console: Console, tmp_path: Path):
    console.watch.expect_status(500)
    page = console.page
    page.route("**/v1/uploads/*/commit", lambda route: route.fulfill(status=500))
    console.upload("again", twin(tmp_path / "again", "json"))
    expect(page.get_by_test_id("failure")).to_be_visible()
    console.let_through("**/v1/uploads/*/commit")
    page.get_by_role("button", name="Try again").press("Enter")
    expect(page.get_by_test_id("upload-ready")).to_be_visible(timeout=START_MS)
    expect(page.locator("main :focus")).to_have_count(1)


def test_the_focus_does_not_move_if_the_user_already_left_the_button(
    new_console: NewConsole, tenant: Tenant, admin_secret: str
):
    tenant.key("infer", name="left")
    console = new_console()
    console.start_session(admin_secret)
    open_keys(console, tenant)
    page = console.page
    row = key_row(console, "left")
    row.get_by_role("button", name="Revoke").focus()
    page.get_by_role("heading", name="Keys of").click()
    key_id = row.locator("code").inner_text().removeprefix("ls-").split("_", 1)[0]
    assert tenant.admin.delete(f"/v1/keys/{key_id}").is_success
    expect(row).to_contain_text("revoked", timeout=START_MS)
    expect(page.locator("main")).to_be_focused()

"""Deleting and restoring tenants, by an admin of the whole server."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from loraserve.store.documents import DocumentStore
from loraserve.store.records import Document, DocumentKind, TenantDoc
from tests.browser.conftest import NewConsole, admin_key
from tests.browser.console import Console
from tests.browser.tenant import Tenant, client, key_for
from tests.browser.test_access import root, status_of
from tests.browser.test_views import MIN_TOUCH_PX, SIZES, TOO_SMALL, check_accessible
from tests.support.demo_questions import ADAPTER_DIR
from tests.support.server_process import serve_fake, stop

__all__ = ["root"]

DAY_S = 86_400


def row_of(page: Page, name: str, *, deleted: bool = False) -> Locator:
    rows = page.get_by_test_id("deleted-tenant-row" if deleted else "tenant-row")
    return rows.filter(has=page.get_by_text(name, exact=True))


def ask_to_delete(console: Console, name: str) -> Locator:
    """Opens the deletion dialog, types the name, and returns the dialog."""
    console.page.get_by_role("button", name=f"Delete {name}", exact=True).click()
    dialog = console.dialog(f"Delete {name}?")
    expect(dialog.get_by_role("button", name="Delete")).to_be_disabled()
    dialog.get_by_label(f"Type {name} to confirm").fill(name)
    return dialog


def test_deleting_a_tenant_requires_typing_its_id_and_refuses_its_key_until_it_is_restored(
    root: Console, tenant: Tenant
):
    tenant.add("uppercase", ADAPTER_DIR / "uppercase")
    page = root.open("#/access")
    dialog = ask_to_delete(root, tenant.name)
    expect(dialog).to_contain_text("It has 1 key and 1 adapter (")
    dialog.get_by_role("button", name="Delete").click()
    toast = root.toast(f"Deleted {tenant.name}.")
    assert status_of(root.url, tenant.operator_key) == 401
    expect(row_of(page, tenant.name)).to_have_count(0)
    gone = row_of(page, tenant.name, deleted=True)
    expect(gone).to_contain_text("Can be restored for 24 h")
    toast.get_by_role("button", name="Undo").click()
    root.toast("Undone.")
    expect(row_of(page, tenant.name)).to_contain_text("active")
    expect(gone).to_have_count(0)
    assert status_of(root.url, tenant.operator_key) == 200
    ask_to_delete(root, tenant.name).get_by_role("button", name="Delete").click()
    expect(gone).to_contain_text("deleted")
    gone.get_by_role("button", name="Restore").click()
    root.toast(f"Restored {tenant.name}, with its keys and adapters.")
    expect(row_of(page, tenant.name)).to_contain_text("active")
    assert [adapter["name"] for adapter in tenant.http.get("/v1/adapters").json()["data"] if adapter["live"]]


def test_built_in_tenants_cannot_be_deleted(root: Console, tenant: Tenant):
    page = root.open("#/access")
    expect(row_of(page, "default").get_by_role("button", name="Suspend")).to_be_visible()
    expect(page.get_by_role("button", name=f"Delete {tenant.name}", exact=True)).to_be_visible()
    for name in ("default", "shared"):
        expect(page.get_by_role("button", name=f"Delete {name}", exact=True)).to_have_count(0)


def test_the_deletion_dialog_shows_what_it_waits_for_and_why_it_failed(root: Console, tenant: Tenant):
    root.watch.expect_status(503)
    page = root.open("#/access")
    held: list[Route] = []
    page.route(f"**/v1/tenants/{tenant.name}", lambda route: held.append(route))
    dialog = ask_to_delete(root, tenant.name)
    delete = dialog.get_by_role("button", name="Delete")
    delete.click()
    expect(dialog.get_by_role("status")).to_contain_text("waiting for its requests to end on every server")
    expect(delete).to_be_disabled()
    message = "Redis is not reachable, so nothing can be changed."
    held[0].fulfill(status=503, content_type="application/json", body=json.dumps({"error": {"message": message}}))
    expect(dialog.get_by_role("alert")).to_contain_text(message)
    expect(dialog.get_by_role("status")).to_have_count(0)
    root.let_through(f"**/v1/tenants/{tenant.name}")
    delete.click()
    root.toast(f"Deleted {tenant.name}.")


def test_the_console_stops_acting_for_a_tenant_that_someone_deletes(root: Console, tenant: Tenant):
    # For requests that this tab sent for the tenant before it noticed the deletion.
    root.watch.expect_status(404)
    page = root.open("#/adapters")
    page.get_by_label("Tenant").select_option(tenant.name)
    root.settle()
    assert tenant.admin.delete(f"/v1/tenants/{tenant.name}").is_success
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    root.toast(f"You can no longer act for tenant {tenant.name}.")
    expect(page.get_by_label("Tenant")).to_have_value("default")
    expect(page.get_by_test_id("adapter-row").first).to_be_visible()


def test_a_user_whose_tenant_is_deleted_is_logged_out(console: Console, tenant: Tenant):
    console.watch.expect_status(401)
    page = console.open("#/adapters")
    assert tenant.admin.delete(f"/v1/tenants/{tenant.name}").is_success
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.get_by_role("button", name="Log in")).to_be_visible()


@pytest.fixture(scope="module")
def server_of_deleted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of a server that has a tenant in every state of a deletion, and the key of its admin."""
    data_dir = tmp_path_factory.mktemp("deleted")
    key, now = admin_key(data_dir), time.time()
    commit(data_dir, "hooli", TenantDoc(kv_salt="", deleted_at=now - 3 * DAY_S, is_erasing=True, erased_at=now - DAY_S))
    commit(data_dir, "umbrella", TenantDoc(kv_salt="", deleted_at=now - DAY_S - 60, is_erasing=True))
    with serve_fake(data_dir) as server, client(server.url, key) as admin:
        assert admin.post("/v1/tenants", json={"id": "initech", "description": "Paper and printers"}).is_success
        key_for(admin, "initech", "infer")
        assert admin.delete("/v1/tenants/initech").is_success
        assert admin.post("/v1/tenants", json={"id": "acme"}).is_success
        yield server.url, key
        stop(server)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_state_of_a_deletion_is_shown_and_accessible(
    new_console: NewConsole, server_of_deleted: tuple[str, str], size: str, theme: str
):
    url, key = server_of_deleted
    width, height = SIZES[size]
    console = new_console(url, width=width, height=height, theme=theme)
    console.start_session(key)
    page = console.open("#/access")
    for name, fate, restorable in (
        ("hooli", "Erased 1 d ago; its usage is kept", False),
        ("umbrella", "Being erased", False),
        ("initech", "Can be restored for 24 h", True),
    ):
        expect(row_of(page, name, deleted=True)).to_contain_text(fate)
        restore = row_of(page, name, deleted=True).get_by_role("button", name="Restore")
        expect(restore).to_have_count(int(restorable))
    check_accessible(page)
    if size == "phone":
        assert page.evaluate(TOO_SMALL, MIN_TOUCH_PX) == []
    ask_to_delete(console, "acme")
    check_accessible(page)


def commit(data_dir: Path, name: str, doc: TenantDoc) -> None:
    document = Document(
        kind=DocumentKind.TENANT,
        id=name,
        rev=1,
        at=time.time(),
        actor="server",
        action="tenant.erased",
        request_id="",
        deleted=True,
        doc=doc,
    )
    DocumentStore(data_dir).commit(document)

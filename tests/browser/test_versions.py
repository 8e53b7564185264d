"""Operating an adapter: versions, aliases, rollback, and taking it out of and back into service."""

import json
import subprocess
from pathlib import Path

import httpx
import pytest
import torch
from playwright.sync_api import Route, expect

from tests.browser.conftest import NewConsole
from tests.browser.console import Console
from tests.browser.tenant import FILES, Tenant
from tests.support.adapter_variants import Tensors, variant
from tests.support.demo_questions import ADAPTER_DIR

MODEL_CONFIG = ADAPTER_DIR.parent / "model" / "config.json"


@pytest.fixture
def versions(tenant: Tenant, tmp_path: Path) -> Tenant:
    """A tenant with an adapter `greeting` of two versions: the first is live, the second has a different alpha."""
    tenant.add("greeting", ADAPTER_DIR / "uppercase")
    louder = variant(tmp_path / "louder", "uppercase", lambda config: config.update(lora_alpha=99))
    assert tenant.add("greeting", louder, activate=False) == 2
    return tenant


def live_version(http: httpx.Client, name: str = "greeting") -> int:
    return http.get(f"/v1/adapters/{name}").json()["live"]["n"]


def test_moving_live_first_shows_the_differences_and_can_be_undone(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting")
    page.get_by_test_id("version-2").click()
    expect(page).to_have_url(f"{console.url}/ui/#/adapters/greeting?v=2")
    page.get_by_test_id("make-live").click()
    dialog = console.dialog("Point an alias at v2")
    expect(dialog.get_by_test_id("move-preview")).to_contain_text("v1 → v2")
    expect(dialog.get_by_role("row", name="lora_alpha")).to_contain_text("99")
    assert live_version(versions.http) == 1
    dialog.get_by_role("button", name="Set alias").click()
    toast = console.toast("live now points to v2.")
    expect(page.locator(".lane-stop.is-live").get_by_test_id("version-2")).to_be_visible()
    assert live_version(versions.http) == 2
    toast.get_by_role("button", name="Undo").click()
    console.toast("Undone.")
    expect(page.locator(".lane-stop.is-live").get_by_test_id("version-1")).to_be_visible()
    assert live_version(versions.http) == 1


def test_rolling_back_takes_two_clicks_and_explains_the_effect(console: Console, versions: Tenant):
    assert versions.http.put("/v1/adapters/greeting/aliases/live", json={"version": 2}).is_success
    page = console.open("#/adapters/greeting")
    page.get_by_test_id("rollback").click()
    dialog = console.dialog("Roll greeting back to v1?")
    expect(dialog).to_contain_text("Running requests finish with v2")
    dialog.get_by_role("button", name="Roll back").click()
    console.toast("Rolled greeting back to v1.")
    expect(page.locator(".lane-stop.is-live").get_by_test_id("version-1")).to_be_visible()
    assert live_version(versions.http) == 1


def test_a_rollback_after_someone_elses_rollback_is_refused(console: Console, versions: Tenant):
    assert versions.http.put("/v1/adapters/greeting/aliases/live", json={"version": 2}).is_success
    page = console.open("#/adapters/greeting")
    page.get_by_test_id("rollback").click()
    dialog = console.dialog("Roll greeting back to v1?")
    assert versions.http.post("/v1/adapters/greeting/rollback", json={}).is_success
    expect(page.locator(".lane-stop.is-live").get_by_test_id("version-1")).to_be_visible()
    expect(dialog).to_contain_text("get v1 instead of v2")
    console.watch.expect_status(412)
    dialog.get_by_role("button", name="Roll back").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Someone else changed this")
    assert live_version(versions.http) == 1


def test_a_canary_splits_the_flag_of_its_alias_and_can_be_undone(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting?v=2")
    page.get_by_test_id("make-live").click()
    dialog = console.dialog("Point an alias at v2")
    dialog.get_by_label("Rollout").select_option("1000")
    expect(dialog.get_by_test_id("move-preview")).to_contain_text("for 10% of users")
    dialog.get_by_role("button", name="Start canary").click()
    expect(page.get_by_test_id("flag-live")).to_contain_text("90%")
    expect(page.get_by_text("10% of live")).to_be_visible()
    toast = console.toast("10% of users of live now get v2.")
    toast.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("10% of live")).to_have_count(0)
    assert versions.http.get("/v1/adapters/greeting").json()["canary_version"] is None


def start_canary(versions: Tenant, weight_bp: int) -> None:
    body = {"version": 1, "canary": {"version": 2, "weight_bp": weight_bp}}
    assert versions.http.put("/v1/adapters/greeting/aliases/live", json=body).is_success


def canary_of(versions: Tenant) -> tuple[int, int | None, int | None]:
    adapter = versions.http.get("/v1/adapters/greeting").json()
    return adapter["live"]["n"], adapter["canary_version"], adapter["canary_weight_bp"]


def test_the_share_of_a_running_canary_can_be_raised(console: Console, versions: Tenant):
    start_canary(versions, 500)
    page = console.open("#/adapters/greeting")
    bar = page.get_by_test_id("canary-live")
    expect(bar).to_contain_text("95% of users")
    bar.get_by_role("button", name="Change share").click()
    dialog = console.dialog("Point an alias at v2")
    expect(dialog.get_by_label("Rollout")).to_have_value("500")
    dialog.get_by_label("Rollout").select_option("2500")
    dialog.get_by_role("button", name="Start canary").click()
    expect(bar).to_contain_text("75% of users")
    assert canary_of(versions) == (1, 2, 2500)


@pytest.mark.parametrize(("button", "live"), [("Use v2 for everyone", 2), ("End canary", 1)])
def test_a_canary_ends_with_either_version_for_everyone(console: Console, versions: Tenant, button: str, live: int):
    start_canary(versions, 1000)
    page = console.open("#/adapters/greeting")
    page.get_by_test_id("canary-live").get_by_role("button", name=button).click()
    toast = console.toast(f"live now points to v{live} for all users.")
    expect(page.get_by_test_id("canary-live")).to_have_count(0)
    assert canary_of(versions) == (live, None, None)
    toast.get_by_role("button", name="Undo").click()
    expect(page.get_by_test_id("canary-live")).to_contain_text("90% of users")
    assert canary_of(versions) == (1, 2, 1000)


def test_a_double_click_ends_a_canary_once(console: Console, versions: Tenant):
    start_canary(versions, 1000)
    page = console.open("#/adapters/greeting")
    # Both clicks come before the first one gets its response.
    held: list[Route] = []
    page.route("**/aliases/live", lambda route: held.append(route))
    button = page.get_by_test_id("canary-live").get_by_role("button", name="Use v2 for everyone")
    button.dblclick()
    expect(button).to_be_disabled()
    for route in held:
        route.continue_()
    console.toast("live now points to v2 for all users.")
    expect(page.get_by_test_id("canary-live")).to_have_count(0)
    expect(page.get_by_test_id("toast")).to_have_count(1)


def test_the_files_of_a_version_can_be_downloaded(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting?v=2")
    for file in FILES:
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Download {file}").click()
        assert download.value.suggested_filename == f"greeting-v2-{file}"
        served = versions.http.get(f"/v1/adapters/greeting/versions/2/files/{file}").content
        assert download.value.path().read_bytes() == served
        if file == FILES[0]:
            assert json.loads(served)["lora_alpha"] == 99


def test_an_adapters_own_chat_template_is_named(console: Console, tenant: Tenant, tmp_path: Path):
    folder = variant(tmp_path / "chats", "reverse", lambda config: config.update(chat_template="twice"))
    tenant.add("chats", folder)
    tenant.add("plain", ADAPTER_DIR / "reverse")
    page = console.open("#/adapters/chats")
    expect(page.get_by_role("definition").filter(has_text="twice")).to_be_visible()
    page = console.open("#/adapters/plain")
    expect(page.get_by_text("Made for")).to_be_visible()
    expect(page.get_by_text("Chat template")).to_have_count(0)


def test_a_chat_template_that_the_server_lacks_is_marked(console: Console, tenant: Tenant, tmp_path: Path):
    folder = variant(tmp_path / "chats", "reverse", lambda config: config.update(chat_template="twice"))
    tenant.add("chats", folder)

    def on_a_server_without_it(route: Route) -> None:
        found = tenant.http.get("/v1/adapters/chats").json()
        route.fulfill(json=found | {"versions": [found["versions"][0] | {"chat_template_missing": True}]})

    page = console.open("#/adapters/chats")
    missing = page.get_by_test_id("template-missing")
    expect(missing).to_have_count(0)
    page.route("**/v1/adapters/chats", on_a_server_without_it)
    page = console.open("#/adapters/chats")
    expect(missing).to_contain_text("chats with it are refused")
    expect(missing).to_contain_text("--adapter-chat-templates twice=FILE")
    expect(page.get_by_role("definition").filter(has_text="twice")).to_contain_text("missing")


def test_the_trained_tokens_of_a_version_are_listed(console: Console, tenant: Tenant, tmp_path: Path):
    ids = [*range(40, 26, -1)]

    def add_rows(tensors: Tensors) -> None:
        hidden_size = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[1]
        rows = torch.ones(len(ids), hidden_size) / hidden_size
        tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"] = rows

    tenant.add(
        "tokens",
        variant(tmp_path / "t", "reverse", lambda config: config.update(trainable_token_indices=ids), add_rows),
    )
    page = console.open("#/adapters/tokens")
    listed = ", ".join(str(token_id) for token_id in sorted(ids)[:12])
    expect(page.get_by_role("definition").filter(has_text=listed)).to_have_text(f"{listed} and 2 more")


def test_the_own_tables_of_a_version_are_listed(console: Console, tenant: Tenant, tmp_path: Path):
    def add_table(tensors: Tensors) -> None:
        hidden_size = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[1]
        tensors["base_model.model.model.embed_tokens.weight"] = torch.zeros(
            json.loads(MODEL_CONFIG.read_text())["vocab_size"], hidden_size
        )

    folder = variant(
        tmp_path / "o", "reverse", lambda config: config.update(modules_to_save=["embed_tokens"]), add_table
    )
    tenant.add("tables", folder)
    page = console.open("#/adapters/tables")
    expect(page.get_by_role("definition").filter(has_text="embed_tokens")).to_have_text("model.embed_tokens")


def test_a_version_with_dora_or_rslora_says_so(console: Console, tenant: Tenant, tmp_path: Path):
    def add_magnitudes(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("lora_B.weight")]:
            rows = tensors[name].shape[0]
            tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.ones(rows)

    folder = variant(tmp_path / "d", "reverse", lambda config: config.update(use_dora=True), add_magnitudes)
    tenant.add("both", folder)
    tenant.add("plain", variant(tmp_path / "p", "reverse", lambda config: config.update(use_rslora=False)))
    page = console.open("#/adapters/both")
    expect(page.get_by_text("Variant")).to_be_visible()
    expect(page.get_by_role("definition").filter(has_text="rsLoRA")).to_have_text("DoRA, rsLoRA")
    page = console.open("#/adapters/plain")
    expect(page.get_by_text("Made for")).to_be_visible()
    expect(page.get_by_text("Variant")).to_have_count(0)


def test_a_missing_certificate_is_explained(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting")
    expect(page.get_by_test_id("certificate")).to_contain_text("Not measured: this server makes no certificates")
    assert versions.http.get("/v1/adapters/greeting/versions/1/certificate").json()["state"] == "skipped"


def test_the_menu_closes_on_escape_and_on_a_click_elsewhere(console: Console, versions: Tenant):
    assert live_version(versions.http) == 1
    page = console.open("#/adapters/greeting")
    menu = page.locator("summary[aria-label='More actions']")
    item = page.get_by_role("button", name="Edit description and tags")
    menu.click()
    expect(item).to_be_visible()
    page.keyboard.press("Escape")
    expect(item).to_be_hidden()
    expect(menu).to_be_focused()
    menu.click()
    page.get_by_role("heading", level=1).click()
    expect(item).to_be_hidden()


def test_the_focus_returns_to_the_menu_after_a_menu_action(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting")
    menu = page.locator("summary[aria-label='More actions']")
    menu.click()
    page.get_by_role("button", name="Edit description and tags").click()
    expect(console.dialog("Edit greeting").get_by_label("Description")).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()
    menu.click()
    page.get_by_role("button", name="Pin for an hour").click()
    console.toast("Pinned")
    expect(menu).to_be_focused()


def test_a_custom_alias_is_created_and_removed(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting?v=2")
    page.get_by_test_id("make-live").click()
    dialog = console.dialog("Point an alias at v2")
    dialog.get_by_label("Alias").fill("staging")
    expect(dialog.get_by_test_id("move-preview")).to_contain_text("greeting@staging: new → v2")
    dialog.get_by_role("button", name="Set alias").click()
    expect(page.get_by_test_id("flag-staging")).to_be_visible()
    page.get_by_role("button", name="Remove the alias staging").click()
    expect(page.get_by_test_id("flag-staging")).to_have_count(0)
    console.toast("Removed the alias staging.").get_by_role("button", name="Undo").click()
    expect(page.get_by_test_id("flag-staging")).to_be_visible()


def test_an_alias_move_after_another_admins_change_is_refused(console: Console, versions: Tenant):
    console.watch.expect_status(412)
    page = console.open("#/adapters/greeting?v=2")
    page.get_by_test_id("make-live").click()
    dialog = console.dialog("Point an alias at v2")
    expect(dialog.get_by_test_id("move-preview")).to_contain_text("v1 → v2")
    # Another admin changes the description after the dialog opened; only the page behind the dialog shows the change.
    assert versions.http.patch("/v1/adapters/greeting", json={"description": "leave this at v1"}).is_success
    expect(page.get_by_text("leave this at v1")).to_be_visible()
    dialog.get_by_role("button", name="Set alias").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Someone else changed this")
    assert live_version(versions.http) == 1
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_test_id("make-live").click()
    console.dialog("Point an alias at v2").get_by_role("button", name="Set alias").click()
    console.toast("live now points to v2.")


def test_an_edit_does_not_overwrite_a_concurrent_edit(console: Console, versions: Tenant):
    console.watch.expect_status(412)
    page = console.open("#/adapters/greeting")
    page.locator("summary[aria-label='More actions']").click()
    page.get_by_role("button", name="Edit description and tags").click()
    dialog = console.dialog("Edit greeting")
    dialog.get_by_label("Description").fill("mine")
    assert versions.http.patch("/v1/adapters/greeting", json={"description": "theirs"}).is_success
    expect(page.get_by_text("theirs", exact=True)).to_be_visible()
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Someone else changed this")
    assert versions.http.get("/v1/adapters/greeting").json()["description"] == "theirs"


def test_a_disabled_adapter_refuses_requests_until_that_is_undone(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting")
    page.locator("summary[aria-label='More actions']").click()
    page.get_by_role("button", name="Disable").click()
    toast = console.toast("Disabled greeting")
    expect(page.locator(".chip").filter(has_text="disabled")).to_be_visible()
    body = {"model": "greeting", "prompt": "hello", "max_tokens": 1}
    assert versions.http.post("/v1/completions", json=body).status_code >= 400
    toast.get_by_role("button", name="Undo").click()
    expect(page.locator(".chip").filter(has_text="ready")).to_be_visible()
    assert versions.http.post("/v1/completions", json=body).status_code == 200


def test_deleting_requires_typing_the_name_and_can_be_undone(console: Console, versions: Tenant):
    console.never_refresh()
    page = console.open("#/adapters/greeting")
    page.locator("summary[aria-label='More actions']").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    dialog = console.dialog("Delete greeting?")
    delete = dialog.get_by_role("button", name="Delete")
    expect(delete).to_be_disabled()
    dialog.get_by_label("Type greeting to confirm").fill("greetin")
    expect(delete).to_be_disabled()
    dialog.get_by_label("Type greeting to confirm").fill("greeting")
    delete.click()
    console.toast("Deleted greeting.")
    expect(page).to_have_url(f"{console.url}/ui/#/adapters")
    row = page.get_by_test_id("adapter-row").filter(has_text="greeting")
    expect(row).to_have_count(0)
    console.toast("Deleted greeting.").get_by_role("button", name="Undo").click()
    expect(row).to_have_count(1)

    assert versions.http.delete("/v1/adapters/greeting", params={"drain_s": 0}).is_success
    page = console.open("#/adapters?state=deleted")
    page.get_by_role("link", name="greeting").click()
    page.get_by_role("button", name="Restore").click()
    console.toast("Restored greeting.")
    expect(page.get_by_role("link", name="Try it")).to_be_visible()
    assert versions.http.get("/v1/adapters/greeting").json()["status"] == "ready"


def test_a_version_that_no_alias_names_can_be_deleted(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting?v=2")
    page.get_by_role("button", name="Delete version").click()
    dialog = console.dialog("Delete greeting@v2?")
    dialog.get_by_label("Type v2 to confirm").fill("v2")
    dialog.get_by_role("button", name="Delete version").click()
    console.toast("Deleted greeting@v2.")
    expect(page.get_by_test_id("version-2")).to_have_count(0)
    expect(page.get_by_test_id("no-such-version")).to_have_count(0)


@pytest.mark.parametrize("button", ["Pin for an hour", "Pin until unpinned"])
def test_a_pin_is_shown_and_can_be_undone(console: Console, versions: Tenant, button: str):
    page = console.open("#/adapters/greeting")
    page.locator("summary[aria-label='More actions']").click()
    page.get_by_role("button", name=button).click()
    expect(page.locator(".detail-name").get_by_text("pinned")).to_be_attached()
    pin = versions.http.get("/v1/adapters/greeting").json()["pin"]
    assert (pin["until"] is None) == (button == "Pin until unpinned")
    console.toast("Pinned").get_by_role("button", name="Undo").click()
    expect(page.locator(".detail-name").get_by_text("pinned")).not_to_be_attached()


def test_the_python_example_can_be_copied_and_contains_no_key(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting?tab=use")
    page.get_by_role("button", name="Copy: Python").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert f'base_url="{console.url}/v1"' in copied
    assert 'model="greeting"' in copied
    assert versions.operator_key not in copied


def test_copied_commands_for_another_tenants_adapter_work_with_a_key_for_all_tenants(
    new_console: NewConsole, versions: Tenant, admin_secret: str
):
    root = new_console()
    root.start_session(admin_secret)
    page = root.open(f"#/adapters/greeting?tenant={versions.name}&tab=use")
    page.get_by_role("button", name="Copy: Python").click()
    assert f'default_headers={{"X-Tenant": "{versions.name}"}}' in page.evaluate("navigator.clipboard.readText()")
    page.get_by_role("button", name="Copy: curl").click()
    command = page.evaluate("navigator.clipboard.readText()")
    for key in (admin_secret, versions.operator_key):
        env = {"LORASERVE_API_KEY": key, "PATH": "/usr/bin:/bin"}
        ran = subprocess.run(["sh", "-c", command], env=env, capture_output=True, check=False, timeout=60)
        assert json.loads(ran.stdout)["model"] == "greeting", ran.stdout


def test_an_activated_adapter_shows_its_invocation_and_its_copied_command_works(
    console: Console, tenant: Tenant, tmp_path: Path
):
    invocation = " judge's turn:"
    activate = variant(
        tmp_path / "judge", "uppercase", lambda config: config.update(alora_invocation_tokens=list(invocation.encode()))
    )
    tenant.add("judge", activate)
    page = console.open("#/adapters/judge")
    fact = page.get_by_role("definition").filter(has_text="judge's turn:")
    expect(fact).to_contain_text("tokens 32, 106")
    page = console.open("#/adapters/judge?tab=use")
    page.get_by_role("button", name="Copy: curl").click()
    command = page.evaluate("navigator.clipboard.readText()")
    env = {"LORASERVE_API_KEY": tenant.operator_key, "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(["sh", "-c", command], env=env, capture_output=True, check=False, timeout=60)
    assert json.loads(ran.stdout)["model"] == "judge", ran.stdout
    expect(page.locator("pre.snippet").nth(1)).to_contain_text("client.completions.create")


def test_another_tenants_adapter_links_to_that_tenants_requests(
    new_console: NewConsole, versions: Tenant, admin_secret: str
):
    root = new_console()
    root.start_session(admin_secret)
    page = root.open(f"#/adapters/greeting?tenant={versions.name}")
    page.get_by_role("definition").filter(has_text="since this server started").get_by_role("link").click()
    expect(page).to_have_url(f"{root.url}/ui/#/requests?adapter=greeting&tenant={versions.name}")


def test_a_missing_version_is_reported_and_the_live_version_is_shown(console: Console, versions: Tenant):
    page = console.open("#/adapters/greeting?v=7")
    expect(page.get_by_test_id("no-such-version")).to_contain_text(
        "Version 7 does not exist or was deleted. Showing version 1."
    )
    expect(page.get_by_text("greeting@v1", exact=True)).to_be_visible()


def test_a_missing_adapter_is_reported_as_not_found(console: Console):
    console.watch.expect_status(404)
    page = console.open("#/adapters/nothing-here")
    expect(page.get_by_test_id("failure").get_by_role("heading", level=1)).to_have_text("Not found")


def test_the_chosen_version_is_in_sight_among_many(new_console: NewConsole, tenant: Tenant, tmp_path: Path):
    for alpha in range(1, 8):
        tenant.add(
            "often", variant(tmp_path / f"{alpha}", "uppercase", lambda config, a=alpha: config.update(lora_alpha=a))
        )
    console = new_console(width=390)
    console.start_session(tenant.operator_key)
    page = console.open("#/adapters/often")
    expect(page.get_by_test_id("version-7")).to_be_in_viewport()
    expect(page.get_by_test_id("version-1")).not_to_be_in_viewport()
    page = console.open("#/adapters/often?v=2")
    expect(page.get_by_test_id("version-2")).to_be_in_viewport()


def test_an_alias_with_a_long_name_can_be_removed_on_a_phone(new_console: NewConsole, versions: Tenant):
    alias = "a" * 64
    assert versions.http.put(f"/v1/adapters/greeting/aliases/{alias}", json={"version": 2}).is_success
    console = new_console(width=390)
    console.start_session(versions.operator_key)
    page = console.open("#/adapters/greeting?v=2")
    chip = page.get_by_title(alias).locator("..").bounding_box()
    cross = page.get_by_role("button", name=f"Remove the alias {alias}").bounding_box()
    assert chip is not None
    assert cross is not None
    assert cross["x"] + cross["width"] <= chip["x"] + chip["width"]

"""Names chosen by someone else are shown as text everywhere."""

import json
import shlex
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.browser.console import Console
from tests.browser.tenant import Tenant
from tests.support.adapter_variants import variant
from tests.support.demo_questions import ADAPTER_DIR

SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>"
TRICKS = f"{SCRIPT} \u202egnihtyreve esrever {{{{7*7}}}} javascript:alert(3)"
LONG = "W" * 300


def see_nothing_ran(console: Console) -> None:
    assert console.page.evaluate("document.querySelectorAll('#app img, #app script').length") == 0


def test_descriptions_and_tags_are_shown_as_text(console: Console, tenant: Tenant):
    dialogs: list[str] = []
    console.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    tenant.add("innocent", ADAPTER_DIR / "uppercase")
    body = {"description": TRICKS + LONG, "tags": ["<b>bold</b>", "a&amp;b"]}
    answer = tenant.http.patch("/v1/adapters/innocent", json=body)
    if not answer.is_success:  # if tags have a restricted alphabet, only the description is free text
        answer = tenant.http.patch("/v1/adapters/innocent", json={"description": TRICKS + LONG})
    assert answer.is_success, answer.text
    page = console.open("#/adapters/innocent")
    expect(page.get_by_text(SCRIPT, exact=False).first).to_be_visible()
    see_nothing_ran(console)
    console.open("#/adapters?q=img")
    see_nothing_ran(console)
    page.set_viewport_size({"width": 390, "height": 844})
    console.open("#/adapters/innocent")
    see_nothing_ran(console)
    assert not dialogs


def test_the_longest_name_fits_the_deletion_dialog_on_a_phone(console: Console, tenant: Tenant):
    name = "W" * 64
    tenant.add(name, ADAPTER_DIR / "uppercase")
    console.page.set_viewport_size({"width": 390, "height": 844})
    page = console.open(f"#/adapters/{name}")
    page.locator("summary[aria-label='More actions']").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    dialog = console.dialog(f"Delete {name}?")
    assert dialog.evaluate("(dialog) => dialog.scrollWidth <= dialog.clientWidth")


def test_file_and_folder_names_are_shown_as_text(console: Console, tmp_path: Path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    variant(folder, "uppercase")
    (folder / "<script>alert(2)<").write_text("x")
    page = console.open("#/upload")
    page.get_by_test_id("folder-input").set_input_files(folder)
    expect(page.get_by_test_id("chosen-files")).to_contain_text("<script>alert(2)<")
    expect(page.locator("input[name=adapter-name]")).to_have_value("img-src-x-onerror-alert-1-")
    see_nothing_ran(console)


def test_configuration_values_are_shown_as_text_in_the_report(console: Console, tmp_path: Path):
    console.watch.expect_status(400)
    hostile = variant(tmp_path / "hostile", "uppercase", lambda config: config.update(peft_type=SCRIPT))
    console.upload("hostile", hostile)
    console.see_upload_end("rejected")
    expect(console.page.get_by_test_id("check-fail").first).to_contain_text("onerror=alert(1)")
    see_nothing_ran(console)


def test_a_hostile_address_is_shown_as_text(console: Console):
    console.watch.expect_status(404)
    page = console.open(f"#/adapters/{'%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E'}?q=%3Cscript%3E")
    expect(page.get_by_role("navigation", name="Breadcrumb")).to_contain_text("<img src=x onerror=alert(1)>")
    see_nothing_ran(console)
    console.open("#/playground?columns=%3Cimg%20src%3Dx%3E,%22%3E%3Cscript%3E")
    see_nothing_ran(console)


def test_model_output_is_shown_as_text(console: Console):
    page = console.open("#/playground?columns=")
    page.get_by_test_id("prompt").fill("<img src=x onerror=alert(1)>")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_test_id("column-0")).to_have_attribute("data-state", "done", timeout=60_000)
    see_nothing_ran(console)


@pytest.mark.parametrize("view", ["requests?adapter=", "upload?name="])
def test_a_command_offered_for_a_hostile_address_is_safely_quoted(console: Console, view: str):
    hostile = "x'; touch hacked; echo $(id) '"
    page = console.open(f"#/{view}{quote(hostile)}")
    words = shlex.split(page.locator(".command code").inner_text(), comments=True)
    assert any(hostile == word or hostile in json.loads(word).values() for word in words if "hacked" in word)

"""Every view: on a phone and a desktop, light and dark, accessible, and small."""

import gzip
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect

import loraserve
from tests.browser.conftest import NewConsole
from tests.browser.console import Console
from tests.browser.tenant import Tenant
from tests.browser.views import VIEWS
from tests.support.adapter_variants import twin
from tests.support.demo_questions import ADAPTER_DIR
from tests.support.server_process import ServerProcess

LONG_NAME = f"shown-{'very-' * 11}1"
"""Almost as long as a name may be: 62 of 64 characters."""
MIN_TOUCH_PX = 40
TOO_SMALL = """
(least) => [...document.querySelectorAll(":is(main, nav, header) :is(button, input, select, textarea, summary, a)")]
  .filter((control) => control.checkVisibility() && !control.closest(".visually-hidden, .skip-link"))
  .filter((control) => getComputedStyle(control).display !== "inline")
  .filter((control) => {
    control.scrollIntoView({ block: "center" });
    const { left, top, width, height } = control.getBoundingClientRect();
    const reaches = (y) => {
      const hit = document.elementFromPoint(left + Math.min(width / 2, 40), y);
      return hit && (control.contains(hit) || hit.closest("label")?.contains(control));
    };
    return height > 0 && ![-1, 1].every((side) => reaches(top + height / 2 + side * (least / 2 - 1)));
  })
  .map((control) => control.outerHTML.slice(0, 160))
"""

REPOSITORY = Path(__file__).parents[2]
AXE = REPOSITORY / "admin_ui" / "node_modules" / "axe-core" / "axe.min.js"
UI = Path(loraserve.__file__).parent / "static" / "ui"
MAX_SCRIPT_BYTES = 60_000
"""Limit for the compressed scripts of a page with its view."""
SIZES = {"desk": (1280, 800), "phone": (390, 844)}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
FIND_VIOLATIONS = """
(rules) => axe.run({ runOnly: { type: "tag", values: rules }, resultTypes: ["violations"] })
  .then((found) => found.violations)
"""


@pytest.fixture(scope="module")
def shown(server: ServerProcess, admin: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    """A tenant with something to show in every view."""
    name = "shown"
    assert admin.post("/v1/tenants", json={"id": name, "limits": {"requests_per_min": 600}}).status_code == 201
    with ExitStack() as stack:
        tenant = Tenant.create(name, server.url, admin, stack)
        tenant.add("shown", ADAPTER_DIR / "uppercase")
        tenant.add(LONG_NAME, ADAPTER_DIR / "rot13")
        tenant.add("shown", twin(tmp_path_factory.mktemp("shown") / "twin", "uppercase"), activate=False)
        tenant.http.put("/v1/adapters/shown/aliases/staging", json={"version": 2})
        tenant.http.patch("/v1/adapters/shown", json={"description": "Shouts what it hears.", "tags": ["prod"]})
        tenant.http.post("/v1/adapters/refused/uploads", json={"files": []})
        for model in ("shown", "shown@v2", LONG_NAME):
            body = {"model": model, "prompt": "hello", "max_tokens": 4}
            assert tenant.http.post("/v1/completions", json=body).status_code == 200
        yield tenant


def open_view(new_console: NewConsole, shown: Tenant, admin_secret: str, view: str, size: str, theme: str) -> Page:
    width, height = SIZES[size]
    console = new_console(width=width, height=height, theme=theme)
    console.start_session(admin_secret)
    console.page.add_init_script(
        f"if (location.protocol !== 'about:') sessionStorage.setItem('tenant', '{shown.name}')"
    )
    return console.open(VIEWS[view])


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_accessible_on_a_desktop_in_both_themes(
    new_console: NewConsole, shown: Tenant, admin_secret: str, view: str
):
    page = open_view(new_console, shown, admin_secret, view, "desk", "light")
    check_accessible(page)
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    check_accessible(page)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_a_phone_and_is_accessible_there(
    new_console: NewConsole, shown: Tenant, admin_secret: str, view: str
):
    # The watch of every console checks for horizontal scrolling.
    page = open_view(new_console, shown, admin_secret, view, "phone", "dark")
    check_accessible(page)
    assert page.evaluate(TOO_SMALL, MIN_TOUCH_PX) == []


@pytest.mark.parametrize("size", SIZES)
def test_the_pages_of_a_request_an_upload_and_an_audit_change_are_accessible(
    new_console: NewConsole, shown: Tenant, admin_secret: str, size: str
):
    (request, *_) = shown.http.get("/v1/requests").json()["data"]
    (upload, *_) = shown.http.get("/v1/uploads").json()["data"]
    page = open_view(new_console, shown, admin_secret, "audit", size, "light")
    page.get_by_role("button", name="Show changes").first.click()
    expect(page.get_by_test_id("audit-change")).to_be_visible()
    check_accessible(page)
    for fragment, name in ((f"requests/{request['id']}", "Request"), (f"upload/{upload['id']}", upload["adapter"])):
        page.goto(f"{page.url.split('#')[0]}#/{fragment}")
        expect(page.get_by_role("heading", level=1)).to_contain_text(name)
        expect(page).to_have_title(re.compile(f"^{fragment.partition('/')[2]} · .+ · loraserve$"))
        expect(page.locator(".skeleton")).to_have_count(0)
        check_accessible(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_outdated_data_is_accessible(new_console: NewConsole, shown: Tenant, admin_secret: str, theme: str):
    page = open_view(new_console, shown, admin_secret, "keys", "desk", theme)
    page.locator(".keys-table").evaluate("(table) => table.classList.add('is-stale')")
    check_accessible(page)


def test_the_login_is_accessible(new_console: NewConsole):
    console = new_console(width=390)
    console.watch.expect_status(401)
    check_accessible(console.open())


def test_dialogs_the_menu_and_the_jump_dialog_are_accessible(new_console: NewConsole, shown: Tenant, admin_secret: str):
    page = open_view(new_console, shown, admin_secret, "another version", "desk", "light")
    page.get_by_test_id("make-live").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    check_accessible(page)
    page.keyboard.press("Escape")
    page.locator("summary[aria-label='More actions']").click()
    check_accessible(page)
    page.get_by_role("button", name="Edit description and tags").click()
    check_accessible(page)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("listbox", name="Results").get_by_role("option").first).to_be_visible()
    check_accessible(page)


def test_text_typed_right_after_the_shortcut_is_searched_and_the_results_fit_the_screen(
    new_console: NewConsole, shown: Tenant, admin_secret: str
):
    page = open_view(new_console, shown, admin_secret, "adapters", "desk", "light")
    page.keyboard.press("Control+k")
    page.keyboard.type("play")
    jump = page.get_by_role("dialog", name="Jump to")
    expect(jump.get_by_role("combobox")).to_have_value("play")
    jump.get_by_role("combobox").fill("")
    expect(jump.get_by_role("option").filter(has_text="shown").first).to_be_visible()
    box = jump.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= SIZES["desk"][1]
    page.keyboard.type("play")
    expect(jump.get_by_role("option")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Playground")).to_be_visible()


def check_accessible(page: Page) -> None:
    if not AXE.exists():
        # In a checkout without a built console; `.ci/run` checks the console before it runs the tests.
        pytest.skip("axe-core is not installed: npm ci in admin_ui")
    if not page.evaluate("'axe' in window"):
        # The console's content security policy refuses a script element.
        page.evaluate(AXE.read_text())
    violations = [
        f"{violation['id']}: {violation['help']}: {node['html'][:150]} {node['failureSummary'][:250]}"
        for violation in page.evaluate(FIND_VIOLATIONS, RULES)
        for node in violation["nodes"][:3]
    ]
    assert not violations, "\n".join(violations)


def test_the_theme_follows_the_system_until_one_is_chosen(new_console: NewConsole, shown: Tenant, admin_secret: str):
    page = open_view(new_console, shown, admin_secret, "live", "desk", "dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Use the light theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_the_time_span_of_the_overview_can_be_chosen_by_keyboard(
    new_console: NewConsole, shown: Tenant, admin_secret: str
):
    page = open_view(new_console, shown, admin_secret, "overview", "desk", "light")
    page.get_by_role("button", name="24 h").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="24 h")).to_have_attribute("aria-pressed", "true")


def test_an_adapter_can_be_operated_by_keyboard_alone(new_console: NewConsole, shown: Tenant, admin_secret: str):
    page = open_view(new_console, shown, admin_secret, "adapters", "desk", "light")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    tab_to(page, "#/adapters/shown")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("version-2")).to_be_visible()
    press_on(page, page.get_by_test_id("version-2"))
    press_on(page, page.get_by_test_id("make-live"))
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Alias")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    assert shown.http.get("/v1/adapters/shown").json()["live"]["n"] == 2
    press_on(page, page.get_by_test_id("toast").get_by_role("button", name="Undo"))
    expect(page.get_by_text("Undone.")).to_be_visible()
    assert shown.http.get("/v1/adapters/shown").json()["live"]["n"] == 1


def tab_to(page: Page, target: str, at_most: int = 60) -> None:
    for _ in range(at_most):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('href')") == target:
            return
    raise AssertionError(f"{target} cannot be reached with {at_most} tabs")


def press_on(page: Page, control: Locator, at_most: int = 80) -> None:
    """Presses Tab until the control has the focus, then Enter."""
    for _ in range(at_most):
        if control.evaluate("(element) => element === document.activeElement"):
            page.keyboard.press("Enter")
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{control} cannot be reached with {at_most} tabs")


def test_no_page_loads_more_script_than_its_budget():
    entry = (UI / "index.html").read_text()
    (first,) = re.findall(r"assets/(index-[\w-]+\.js)", entry)
    views = [path.name for path in (UI / "assets").glob("*.js") if path.name != first]
    assert views
    sizes = {view: sum(map(compressed, needs({view, first}))) for view in views}
    assert max(sizes.values()) <= MAX_SCRIPT_BYTES, sizes


def needs(scripts: set[str]) -> set[str]:
    """The scripts and everything they import, directly or indirectly."""
    static = {
        name
        for script in scripts
        for name in re.findall(r'(?:from|import)\s*"\./([\w.-]+\.js)"', (UI / "assets" / script).read_text())
    }
    return scripts if static <= scripts else needs(scripts | static)


def compressed(script: str) -> int:
    return len(gzip.compress((UI / "assets" / script).read_bytes()))


def test_the_built_console_references_no_other_hosts_and_no_inline_code():
    text = (UI / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text)
    assert "<script>" not in text
    assert "style=" not in text


def test_the_console_works_under_a_path_prefix_of_a_proxy(console: Console, tenant: Tenant) -> None:
    tenant.add("mine", ADAPTER_DIR / "uppercase")
    prefix, outside = f"{console.url}/lora/", []

    def forward(route: Route) -> None:
        url = route.request.url
        if url.startswith(prefix):
            route.fulfill(response=route.fetch(url=f"{console.url}/{url.removeprefix(prefix)}"))
        else:
            outside.append(url)
            route.abort()

    page = console.page
    page.route("**/*", forward)
    page.goto(f"{prefix}ui/#/adapters/mine?tab=use")
    expect(page.get_by_text(f"{prefix}adapters/mine/v1", exact=True)).to_be_visible()
    assert outside == []

"""A console in a browser, with the actions that many tests perform."""

from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from tests.browser.watch import Watch

START_MS = 60_000
"""Time to load and try an adapter on a busy machine."""


@dataclass(frozen=True, slots=True)
class Console:
    page: Page
    url: str
    watch: Watch

    def start_session(self, key: str) -> None:
        """Logs in without the form."""
        answer = self.page.request.post(f"{self.url}/v1/session", data={"key": key}, headers={"origin": self.url})
        assert answer.ok, answer.text()

    def open(self, fragment: str = "#/") -> Page:
        """Opens a view and waits until its script and first data have loaded."""
        # Changing only the fragment loads nothing; a test that opens a view wants a fresh page.
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/ui/{fragment}")
        expect(self.page.locator("main")).to_be_visible()
        self.settle()
        return self.page

    def never_refresh(self) -> None:
        """In views opened from now on, lists do not refresh themselves: they show only what the page learns at once."""
        self.page.add_init_script("window.setInterval = () => 0;")

    def let_through(self, pattern: str) -> None:
        """Lets requests that `page.route` has intercepted so far reach the server. `unroute` would remove the page's
        last route, and Chromium then loses requests in flight: on a busy machine, the page never showed in one of a
        hundred reloads."""
        self.page.route(pattern, lambda route: route.continue_())

    def settle(self) -> None:
        """Waits until no skeleton is left."""
        expect(self.page.get_by_test_id("loading")).to_have_count(0)
        expect(self.page.locator(".skeleton")).to_have_count(0)

    def toast(self, text: str) -> Locator:
        toast = self.page.get_by_test_id("toast").filter(has_text=text)
        expect(toast).to_be_visible()
        return toast

    def dialog(self, title: str) -> Locator:
        dialog = self.page.get_by_role("dialog", name=title)
        expect(dialog).to_be_visible()
        return dialog

    def upload(self, name: str, folder: Path, *, activate: bool = True) -> None:
        """Starts an upload through the form; does not wait for its end."""
        self.open("#/upload")
        self.page.get_by_test_id("folder-input").set_input_files(folder)
        self.page.get_by_label("Name", exact=True).fill(name)
        if not activate:
            self.page.get_by_role("checkbox").uncheck()
        self.page.get_by_role("button", name="Upload", exact=True).click()

    def see_upload_end(self, state: str) -> Locator:
        end = self.page.get_by_test_id(f"upload-{state}")
        expect(end).to_be_visible(timeout=START_MS)
        return end

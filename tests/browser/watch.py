"""Faults that no page of the console may ever have, recorded while a test drives it."""

import re
from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Page, Request

NARROW_PX = 390

REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => {
  console.error(`content security policy: ${event.violatedDirective} ${event.blockedURI}`);
});
"""


class Watch:
    """Records errors in the browser's console (including content security policy reports), exceptions, requests to
    another host, and pages wider than a narrow screen."""

    def __init__(self, page: Page, url: str) -> None:
        self.faults: list[str] = []
        self._page = page
        self._host = urlsplit(url).netloc
        self._expected: list[str] = []
        page.add_init_script(REPORT_VIOLATIONS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", self._on_request)

    def expect_status(self, status: int) -> None:
        """Allows the line that Chromium itself logs for a response of 400 or above, which this test provokes."""
        self._expected.append(rf"^Failed to load resource: the server responded with a status of {status} ")

    def expect_no_answer(self) -> None:
        """Allows failed connections, for example because the test stops the server."""
        self._expected.append(r"^Failed to load resource: net::ERR_")

    def check(self) -> None:
        self.check_width()
        assert not self.faults, "\n".join(self.faults)

    def check_width(self) -> None:
        width = self._page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        viewport = self._page.evaluate("window.innerWidth")
        if viewport <= NARROW_PX and width > viewport:
            self.faults.append(f"{self._page.url} is {width} px wide on a screen of {viewport} px")

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type != "error" or any(re.search(pattern, message.text) for pattern in self._expected):
            return
        self.faults.append(f"console: {message.text} ({message.location.get('url')})")

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https") and parts.netloc != self._host:
            self.faults.append(f"a request to another host: {request.url}")

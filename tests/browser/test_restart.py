"""A server that goes away and comes back under an open page."""

import socket
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.browser.conftest import admin_key, watched_console
from tests.support.server_process import serve, stop

RESTART_MS = 60_000


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_lost_server_shows_and_the_page_heals_by_itself(browser: Browser, fresh_dir: Callable[[], Path]):
    data_dir, port = fresh_dir(), str(free_port())
    key = admin_key(data_dir)
    with serve(data_dir, "--port", port) as first, watched_console(browser, first.url, 1280, 800, "light") as console:
        console.watch.expect_no_answer()
        # What the new process says until its Redis and engine are there.
        console.watch.expect_status(503)
        console.start_session(key)
        page = console.open("#/adapters")
        expect(page.get_by_test_id("adapter-row").first).to_be_visible()
        page = console.open("#/live")
        lost = page.get_by_test_id("lost-server")
        expect(lost).to_have_count(0)
        stop(first)
        expect(lost).to_be_visible(timeout=RESTART_MS)
        # What was there stays readable.
        expect(page.get_by_role("heading", name="Live")).to_be_visible()
        with serve(data_dir, "--port", port) as second:
            expect(lost).to_have_count(0, timeout=RESTART_MS)
            # The session outlived the process.
            page.get_by_role("link", name="Adapters").click()
            expect(page.get_by_test_id("adapter-row").first).to_be_visible(timeout=RESTART_MS)
            stop(second)
            console.page.goto("about:blank")

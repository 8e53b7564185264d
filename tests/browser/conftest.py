"""A real server with keys on the demo model, Chromium, and for each test one tenant with a console of its own."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from loraserve.control.tenancy.offline_keys import create_key_offline
from loraserve.store.documents import DocumentStore
from loraserve.store.records import ANY_TENANT, Role
from tests.browser.console import Console
from tests.browser.tenant import Tenant, client
from tests.browser.watch import Watch
from tests.support.server_process import ServerProcess, serve, stop

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
"""The first has no windows to maintain, so a page takes half the CPU: 0.48 s against 0.92 s for the console's list."""
BROWSER_FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]
MAX_TENANTS = 1000
WAIT_MS = 20_000
"""For actions and expectations; a busy machine needs more than Playwright's 5 s for what usually takes a moment."""

NewConsole = Callable[..., Console]


def admin_key(data_dir: Path) -> str:
    """A server's first key, created offline as `loraserve keys create --data-dir` does."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return create_key_offline(DocumentStore(data_dir), role=Role.ADMIN, tenant=ANY_TENANT).text


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def admin_secret(data_dir: Path) -> str:
    return admin_key(data_dir)


@pytest.fixture(scope="session")
def server(data_dir: Path, admin_secret: str) -> Iterator[ServerProcess]:
    template = data_dir / "twice.jinja"
    template.write_text("{{ messages[0].content }}{{ messages[0].content }}")
    with serve(data_dir, "--adapter-chat-templates", f"twice={template}") as server:
        yield server
        assert server.process.poll() is None, server.text
        stop(server)


@pytest.fixture(scope="session")
def admin(server: ServerProcess, admin_secret: str) -> Iterator[httpx.Client]:
    with client(server.url, admin_secret) as http:
        yield http


@pytest.fixture(scope="session")
def tenant_numbers() -> Iterator[int]:
    """Counts down so that a new tenant is on the first page of a list sorted by name, however many tests there are."""
    return iter(range(MAX_TENANTS, 0, -1))


@pytest.fixture
def tenant(server: ServerProcess, admin: httpx.Client, tenant_numbers: Iterator[int]) -> Iterator[Tenant]:
    name = f"tenant-{next(tenant_numbers):04}"
    assert admin.post("/v1/tenants", json={"id": name}).status_code == 201
    with ExitStack() as stack:
        yield Tenant.create(name, server.url, admin, stack)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        # On a developer's machine; `.ci/run` installs a browser.
        pytest.skip(f"no Chromium on PATH ({', '.join(BROWSERS)})")
    expect.set_options(WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def new_console(browser: Browser, server: ServerProcess) -> Iterator[NewConsole]:
    """Creates consoles, each in its own browser profile; a fault in any of them fails the test."""
    with ExitStack() as stack:

        def new(url: str = server.url, *, width: int = 1280, height: int = 800, theme: str = "light") -> Console:
            return stack.enter_context(watched_console(browser, url, width, height, theme))

        yield new


@pytest.fixture
def console(new_console: NewConsole, tenant: Tenant) -> Console:
    """Logged in as the tenant's operator."""
    console = new_console()
    console.start_session(tenant.operator_key)
    return console


@contextmanager
def watched_console(browser: Browser, url: str, width: int, height: int, theme: str) -> Iterator[Console]:
    context: BrowserContext = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
        reduced_motion="reduce",
        permissions=["clipboard-read", "clipboard-write"],
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    watch = Watch(page, url)
    try:
        yield Console(page, url, watch)
        watch.check()
    finally:
        # Routes may still be answering requests, which fail when the page closes.
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")
        context.close()

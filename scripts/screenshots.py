"""Takes the documentation's pictures of the console: a real server on the demo model, seen in Chromium.

`make screenshots` runs it. Fails if there are more than 6 images or 0.75 MB in all.
"""

import argparse
import itertools
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from playwright.sync_api import Browser, BrowserType, Page, sync_playwright
from usage_history import write_usage_history

import loraserve.demo

ADAPTERS = Path(loraserve.demo.__file__).parent / "adapters"
FILES = ("adapter_config.json", "adapter_model.safetensors")
TRAFFIC_S = 100.0
NUM_CLIENTS = 6
MAX_IMAGES = 6
MAX_BYTES = 750_000
SIZE = (1280, 800)
SETTLE_MS = 1500
"""Time for the charts and the last poll."""


@dataclass(frozen=True, slots=True)
class Shot:
    name: str
    fragment: str
    theme: str = "light"


SHOTS = [
    Shot("console-adapter", "#/adapters/support-tone"),
    Shot("console-live-dark", "#/live", theme="dark"),
    Shot("console-tenants-dark", "#/access", theme="dark"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch) / "data") as url:
        fill(url, Path(scratch))
        with sync_playwright() as playwright, chromium(playwright.chromium) as browser:
            traffic(url)
            take(browser, url, SHOTS, folder)
            playground(browser, url, folder / "console-playground.png")
            refused_upload(browser, url, Path(scratch), folder / "console-report.png")
    check(folder)


def take(browser: Browser, url: str, shots: list[Shot], folder: Path) -> None:
    for shot in shots:
        with view(browser, url, shot) as page:
            page.screenshot(path=folder / f"{shot.name}.png")


@contextmanager
def served(data_dir: Path) -> Iterator[str]:
    data_dir.mkdir(mode=0o700)
    write_usage_history(data_dir)
    # So little memory that the demo's small adapters are visible in it.
    memory = ["--adapter-memory-bytes", "4M", "--kv-cache-memory-bytes", "16M"]
    command = [sys.executable, "-m", "loraserve.cli.main", "serve", "--port", "0", "--data-dir", str(data_dir), *memory]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("loraserve is ready: "):
                yield line.split(": ", 1)[1].split()[0]
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def chromium(kind: BrowserType) -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    browser = kind.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
    yield browser
    browser.close()


def fill(url: str, scratch: Path) -> None:
    """Creates adapters, versions and tenants."""
    with httpx.Client(base_url=url, timeout=60) as http:
        for tenant, weight in (("acme", 2), ("globex", 1)):
            body = {"id": tenant, "weight": weight, "limits": {"requests_per_min": 600, "max_concurrent": 8}}
            http.post("/v1/tenants", json=body).raise_for_status()
        upload(http, "support-tone", ADAPTERS / "reverse")
        upload(http, "support-tone", changed(scratch / "second", "uppercase", lora_alpha=30))
        upload(http, "support-tone", ADAPTERS / "uppercase", activate=False)
        upload(http, "sql-generation", ADAPTERS / "json")
        about = {"description": "Answers like our support team: short, friendly, with the next step.", "tags": ["prod"]}
        http.patch("/v1/adapters/support-tone", json=about).raise_for_status()
        canary = {"version": 2, "canary": {"version": 3, "weight_bp": 1000}}
        http.put("/v1/adapters/support-tone/aliases/live", json=canary).raise_for_status()
        http.put("/v1/adapters/support-tone/aliases/staging", json={"version": 3}).raise_for_status()


def traffic(url: str) -> None:
    """Requests from a few clients with varying pauses, for long enough that the charts have something to draw."""
    models = ("support-tone", "sql-generation", "reverse", "spell", "loraserve-demo", "support-tone@staging")
    prompts = ("hello world", "good morning", "red apple", "what a day", "three birds", "a blue door")
    end = time.monotonic() + TRAFFIC_S

    def client(number: int) -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            for step in itertools.count():
                if time.monotonic() > end:
                    return
                prompt = prompts[(number + step) % len(prompts)]
                messages = [{"role": "user", "content": prompt}]
                body = {"model": models[step % len(models)], "messages": messages, "max_tokens": 48}
                http.post("/v1/chat/completions", json=body).raise_for_status()
                time.sleep(0.05 + 0.3 * (math.sin(step / 9) + 1))

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(client, range(NUM_CLIENTS)))


def upload(http: httpx.Client, name: str, folder: Path, *, activate: bool = True) -> None:
    files = [{"name": file, "size_bytes": (folder / file).stat().st_size} for file in FILES]
    opened = http.post(f"/v1/adapters/{name}/uploads", json={"files": files, "activate": activate}).raise_for_status()
    path = f"/v1/uploads/{opened.json()['id']}"
    for file in FILES:
        content = (folder / file).read_bytes()
        headers = {
            "content-type": "application/octet-stream",
            "content-range": f"bytes 0-{len(content) - 1}/{len(content)}",
        }
        http.put(f"{path}/files/{file}", content=content, headers=headers).raise_for_status()
    http.post(f"{path}/commit").raise_for_status()
    while (session := http.get(path, params={"wait_s": 10}).json())["state"] in ("validating", "loading"):
        pass
    assert session["state"] == "ready", session


def changed(folder: Path, adapter: str, **options: object) -> Path:
    shutil.copytree(ADAPTERS / adapter, folder)
    config = json.loads((folder / FILES[0]).read_text())
    (folder / FILES[0]).write_text(json.dumps({**config, **options}))
    return folder


@contextmanager
def view(browser: Browser, url: str, shot: Shot) -> Iterator[Page]:
    width, height = SIZE
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if shot.theme == "dark" else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(f"{url}/ui/{shot.fragment}")
    page.wait_for_timeout(SETTLE_MS)
    yield page
    context.close()


def playground(browser: Browser, url: str, path: Path) -> None:
    with view(browser, url, Shot("", "#/playground?columns=,support-tone,reverse")) as page:
        page.get_by_test_id("prompt").fill("the quick brown fox")
        page.get_by_label("Mark what differs").check()
        page.get_by_role("button", name="Send").click()
        page.locator("[data-state=done]").nth(2).wait_for()
        page.screenshot(path=path)


def refused_upload(browser: Browser, url: str, scratch: Path, path: Path) -> None:
    folder = changed(scratch / "refused", "rot13", use_qalora=True, r=512)
    with view(browser, url, Shot("", "#/upload?name=translate-de", theme="dark")) as page:
        page.get_by_test_id("folder-input").set_input_files(folder)
        page.get_by_role("button", name="Upload", exact=True).click()
        page.get_by_test_id("report").wait_for()
        page.screenshot(path=path)


def check(folder: Path) -> None:
    images = sorted(folder.glob("console-*.png"))
    total = sum(image.stat().st_size for image in images)
    if len(images) > MAX_IMAGES or total > MAX_BYTES:
        raise SystemExit(f"{len(images)} images of {total} bytes; at most {MAX_IMAGES} and {MAX_BYTES} are allowed")
    print(f"{len(images)} images, {total} bytes, in {folder}")


if __name__ == "__main__":
    main()

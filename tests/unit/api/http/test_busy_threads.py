"""The event loop's threads are for disks: requests for text or for data in memory never wait for them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import LiveServer, live_server, make_settings

PATIENCE_S = 20.0
REQUESTS = {
    "/v1/models": None,
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}


@contextmanager
def busy_threads(live: LiveServer) -> Iterator[None]:
    """Occupies all threads of the server's event loop: one, here."""
    is_reading, disk_answers = threading.Event(), threading.Event()

    def read() -> None:
        is_reading.set()
        disk_answers.wait()

    live.call(lambda: live.loop.set_default_executor(ThreadPoolExecutor(1)))
    live.call(lambda: live.loop.run_in_executor(None, read))
    assert is_reading.wait(PATIENCE_S)
    try:
        yield
    finally:
        disk_answers.set()


@pytest.mark.parametrize("path", REQUESTS)
def test_a_request_does_not_wait_for_a_disk(tmp_path: Path, path: str) -> None:
    body = REQUESTS[path]
    with live_server(FakeEngine(), make_settings(tmp_path)) as live, busy_threads(live):
        ask = {"method": "GET"} if body is None else {"method": "POST", "json": body}
        response = httpx.request(url=live.url + path, timeout=PATIENCE_S, **ask)
    assert response.status_code == 200

"""The event loop's threads are for disks: who asks for text, or for what is in memory, never waits for them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import LiveServer, live_server, make_settings

NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Of an event loop, unless it is given others."""
PATIENCE_S = 20.0
REQUESTS = {
    "/v1/models": None,
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}


@contextmanager
def busy_threads(live: LiveServer) -> Iterator[None]:
    disk_answers, waiting = threading.Event(), threading.Semaphore(0)

    def read() -> None:
        waiting.release()
        disk_answers.wait()

    live.call(lambda: [live.loop.run_in_executor(None, read) for _ in range(NUM_THREADS)])
    for _ in range(NUM_THREADS):
        assert waiting.acquire(timeout=PATIENCE_S)
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

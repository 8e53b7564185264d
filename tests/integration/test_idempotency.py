"""Repeated requests over HTTP, including when the first is still in progress or was never finished."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraserve.control.tenancy.offline_keys import create_key_offline
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.key_names import DEFAULT_PREFIX
from loraserve.store.documents import DocumentStore
from loraserve.store.records import ANY_TENANT, Role
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import LiveServer, live_server, make_settings

KEYS, UPLOADS = "/v1/keys", "/v1/adapters/skill/uploads"
BODIES: dict[str, dict[str, Any]] = {
    KEYS: {"role": "infer", "tenant": "default"},
    UPLOADS: {
        "files": [
            {"name": "adapter_config.json", "size_bytes": 10},
            {"name": "adapter_model.safetensors", "size_bytes": 10},
        ]
    },
}


@pytest.fixture
def admin_key(tmp_path: Path) -> str:
    return create_key_offline(DocumentStore(tmp_path), role=Role.ADMIN, tenant=ANY_TENANT).text


@pytest.fixture
def server(tmp_path: Path, admin_key: str) -> Iterator[LiveServer]:
    with live_server(FakeEngine(), make_settings(tmp_path)) as server:
        yield server


@pytest.fixture
def admin(server: LiveServer, admin_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {admin_key}"}, timeout=20) as http:
        yield http


def create(admin: httpx.Client, path: str, **changes: Any) -> httpx.Response:
    return admin.post(path, json={**BODIES[path], **changes}, headers={"idempotency-key": "just this once"})


class Held:
    """Work on the server's event loop that waits for `release` before it begins."""

    def __init__(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        self._server = server
        self._may_begin = asyncio.Event()
        self._num_begun = 0
        service = server.control.keys if path == KEYS else server.control.uploads
        name = "create" if path == KEYS else "open"
        work = getattr(service, name)

        async def held(*args: Any, **options: Any) -> Any:
            self._num_begun += 1
            await self._may_begin.wait()
            return await work(*args, **options)

        monkeypatch.setattr(service, name, held)

    @property
    def num_begun(self) -> int:
        return self._num_begun

    def wait_begun(self) -> None:
        self._server.wait_until(lambda: self._num_begun > 0)

    def release(self) -> None:
        self._server.call(self._may_begin.set)


@pytest.mark.parametrize("path", [KEYS, UPLOADS])
def test_repetitions_are_told_to_wait_while_the_first_request_is_in_progress(
    server: LiveServer, admin: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    held = Held(server, monkeypatch, path)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(create, admin, path)
        try:
            held.wait_begun()
            repeated = [*threads.map(lambda _: create(admin, path), range(3))]
        finally:
            held.release()
        created = first.result()
    assert created.status_code == 201, created.text
    assert [(each.status_code, each.json()["error"]["code"]) for each in repeated] == [
        (409, "idempotency_conflict")
    ] * 3
    assert {each.headers["retry-after"] for each in repeated} == {"1"}
    again = create(admin, path)
    assert (again.status_code, again.json()["id"]) == (201, created.json()["id"])
    assert held.num_begun == 1


def test_another_body_is_refused_without_retry_after_whether_or_not_the_first_is_done(
    server: LiveServer, admin: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(server, monkeypatch, KEYS)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(create, admin, KEYS)
        try:
            held.wait_begun()
            other = create(admin, KEYS, name="another")
        finally:
            held.release()
        assert first.result().status_code == 201
    for refused in (other, create(admin, KEYS, name="another")):
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")
        assert "retry-after" not in refused.headers


def test_an_unfinished_request_can_be_repeated_once_its_record_is_gone(server: LiveServer, admin: httpx.Client) -> None:
    """As after a kill: the request's record exists, but the request is not in progress."""
    created = create(admin, KEYS)
    assert created.status_code == 201
    (name,) = [word for word in server.valkey.command("KEYS", f"{{{DEFAULT_PREFIX}}}:x:*").split() if ":x:" in word]
    finished = server.valkey.command("GET", name).partition("\r\n")[2].strip()
    unfinished = finished[: finished.index('"response":')] + '"response":null}'
    assert server.valkey.command("SET", name, unfinished) == "+OK\r\n"
    assert create(admin, KEYS).status_code == 409
    assert server.valkey.command("DEL", name) == ":1\r\n"
    repeated = create(admin, KEYS)
    assert repeated.status_code == 201
    assert repeated.json()["secret"]


@pytest.mark.parametrize("with_key", [True, False])
def test_a_secret_is_returned_even_if_redis_fails_once_the_key_is_on_disk(
    server: LiveServer, admin: httpx.Client, monkeypatch: pytest.MonkeyPatch, with_key: bool
) -> None:
    async def refused(*_: object) -> None:
        raise LiveUnavailableError("Redis refused: OOM")

    monkeypatch.setattr(server.control.live.documents, "put", refused)
    monkeypatch.setattr(server.control.live.sessions, "end_idempotent", refused)
    headers = {"idempotency-key": "just this once"} if with_key else {}
    created = admin.post(KEYS, json=BODIES[KEYS], headers=headers)
    assert created.status_code == 201, created.text
    rotated = admin.post(f"{KEYS}/{created.json()['id']}/rotate", json={"grace_s": 0})
    assert rotated.status_code == 201, rotated.text
    for secret, status in ((created.json()["secret"], 401), (rotated.json()["secret"], 200)):
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": secret}).status_code == status


def test_a_failed_request_can_be_repeated_at_once(server: LiveServer, admin: httpx.Client) -> None:
    assert create(admin, KEYS, tenant="nobody").status_code == 404
    assert server.valkey.command("KEYS", f"{{{DEFAULT_PREFIX}}}:x:*") == "*0\r\n"
    assert create(admin, KEYS).status_code == 201

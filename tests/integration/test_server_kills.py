"""The server is killed repeatedly during uploads, alias moves and requests: nothing is left half done."""

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import redis

from loraserve.live.key_names import KeyNames
from loraserve.store.documents import DocumentStore
from loraserve.store.records import DocumentKind
from loraserve.store.uploads import UploadStore
from tests.support.fake_engine import first_token
from tests.support.management import (
    ADAPTER_FILES,
    add_adapter,
    client,
    complete,
    fake_adapter,
    offline_admin_key,
    token_ids,
)
from tests.support.server_process import ServerProcess, serve_fake, wait_until

KILLS = 20
UPLOAD_STATES = {"open", "ready", "rejected", "failed", "expired", "aborted"}
"""States that an upload may have once nothing works on it."""


@dataclass(slots=True)
class Expected:
    """The outcomes that the server confirmed."""

    num_versions: Counter[str] = field(default_factory=Counter)
    """Lower bounds, by adapter."""
    num_uploads: int = 0
    chosen: set[int | None] = field(default_factory=lambda: {None})
    """Versions that the alias `chosen` may point to: the last confirmed move, and moves after it that got no answer."""


@pytest.mark.slow
def test_twenty_kills_leave_all_or_nothing(tmp_path: Path) -> None:
    """Uploads, alias moves and requests run at full speed; the moment of each kill is random."""
    data_dir, delays, draw = tmp_path / "data", random.Random(5), random.Random(6)
    key = offline_admin_key(data_dir)
    folders = [fake_adapter(tmp_path / str(seed), seed) for seed in range(8)]
    expected = Expected()
    for _ in range(KILLS):
        with serve_fake(data_dir) as server, client(server, key) as http:
            check(http, expected)
            killed = threading.Event()
            works: list[Callable[[httpx.Client], object]] = [
                lambda http: publish(http, "left", draw, folders, expected),
                lambda http: publish(http, "right", draw, folders, expected),
                lambda http: move(http, draw, expected),
                lambda http: complete(http, "left"),
            ]
            threads = [threading.Thread(target=keep, args=(killed, server, key, work)) for work in works]
            for thread in threads:
                thread.start()
            # Most kills come during the first upload, some after one or two.
            target = expected.num_uploads + delays.choice((0, 0, 0, 1, 2))
            wait_until(lambda target=target: expected.num_uploads >= target, "uploads go on")
            time.sleep(delays.uniform(0.0, 0.6))
            server.signal(signal.SIGKILL)
            killed.set()
            server.wait()
            for thread in threads:
                thread.join()
        check_files(data_dir)
    with serve_fake(data_dir) as server, client(server, key) as http:
        check(http, expected)
        result = add_adapter(http, "left", fake_adapter(tmp_path / "last", 99))["result"]
        assert token_ids(complete(http, "left")) == [first_token(result["digest"])]
    assert min(expected.num_versions.values()) >= 2
    assert expected.chosen != {None}


def test_uploads_after_a_kill_do_not_wait_for_the_killed_servers_lease(tmp_path: Path) -> None:
    """As if the server had been killed while publishing."""
    data_dir = tmp_path / "data"
    key = offline_admin_key(data_dir)
    with serve_fake(data_dir) as server:
        path = (data_dir / "kv" / "socket.path").read_text().strip()
        with redis.Redis(unix_socket_path=path) as kv:
            # Longer than an upload would wait for it.
            assert kv.set(KeyNames().publish_lease("default"), "killed", px=600_000)
        server.signal(signal.SIGKILL)
        server.wait()
    with serve_fake(data_dir) as server, client(server, key) as http:
        add_adapter(http, "left", fake_adapter(tmp_path / "left", 1))


def test_usage_counters_equal_the_sum_of_the_logs_after_kills(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    key = offline_admin_key(data_dir)
    for num_kills in range(1, 5):
        with serve_fake(data_dir) as server:
            killed = threading.Event()
            threads = [
                threading.Thread(target=keep, args=(killed, server, key, lambda http: complete(http, "fake", 3)))
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda least=20 * num_kills: logged_usage(data_dir)[0] >= least, "requests are logged")
            server.signal(signal.SIGKILL)
            killed.set()
            server.wait()
            for thread in threads:
                thread.join()
    with serve_fake(data_dir) as server, client(server, key) as http:
        logged = logged_usage(data_dir)

        def counted() -> tuple[int, ...]:
            report = http.get("/v1/usage").json()
            names = ("num_requests", "num_prompt_tokens", "num_output_tokens")
            return tuple(sum(row[name] for row in report["data"]) for name in names)

        wait_until(lambda: counted() == logged, f"the counters are {logged}")
        assert counted() == logged


def keep(killed: threading.Event, server: ServerProcess, key: str, work: Callable[[httpx.Client], object]) -> None:
    """Repeats `work` until the server is gone."""
    with client(server, key) as http:
        while not killed.is_set():
            try:
                work(http)
            except httpx.TransportError:
                return


def publish(http: httpx.Client, name: str, draw: random.Random, folders: list[Path], expected: Expected) -> None:
    folder = draw.choice(folders)
    files = [("files", (file, (folder / file).read_bytes())) for file in ADAPTER_FILES]
    response = http.post("/v1/adapters", data={"name": name}, files=files)
    if response.status_code == 201:
        expected.num_uploads += 1
        expected.num_versions[name] = max(expected.num_versions[name], response.json()["result"]["version"])


def move(http: httpx.Client, draw: random.Random, expected: Expected) -> None:
    version = 1 + draw.randrange(max(1, expected.num_versions["left"]))
    expected.chosen.add(version)
    response = http.put("/v1/adapters/left/aliases/chosen", json={"version": version})
    if response.status_code == 200:
        expected.chosen = {version}


def check(http: httpx.Client, expected: Expected) -> None:
    """Every confirmed change is there, and everything that is there is complete and served."""
    for name in ("left", "right"):
        shown = http.get(f"/v1/adapters/{name}")
        if shown.status_code == 404:
            assert expected.num_versions[name] == 0
            continue
        found = shown.json()
        versions = {version["n"]: version["digest"] for version in found["versions"]}
        assert sorted(versions) == [*range(1, len(versions) + 1)]
        assert len(set(versions.values())) == len(versions)
        assert len(versions) >= expected.num_versions[name]
        for version, digest in versions.items():
            assert token_ids(complete(http, f"{name}@v{version}")) == [first_token(digest)]
        aliases = {alias["alias"]: alias["version"] for alias in found["aliases"]}
        assert aliases["live"] in versions
        if name == "left":
            assert aliases.get("chosen") in expected.chosen
    for upload in http.get("/v1/uploads", params={"limit": 500}).json()["data"]:
        state = http.get(f"/v1/uploads/{upload['id']}", params={"wait_s": 30}).json()["state"]
        assert state in UPLOAD_STATES, state


def check_files(data_dir: Path) -> None:
    """Every document and upload can be read, and every content is complete."""
    documents = DocumentStore(data_dir)
    for kind in DocumentKind:
        for document in documents.scan(kind):
            assert documents.get(kind, document.id) == document
    assert UploadStore(data_dir).sessions()
    for folder in (data_dir / "blobs").glob("*/*"):
        if len(folder.name) == 64:
            assert {path.name for path in folder.iterdir()} >= {*ADAPTER_FILES, "manifest.json"}


def logged_usage(data_dir: Path) -> tuple[int, ...]:
    """Requests, prompt and output tokens, summed over all complete lines."""
    lines = [
        json.loads(line) for path in (data_dir / "usage").rglob("*.jsonl") for line in path.read_text().split("\n")[:-1]
    ]
    assert len({line["request_id"] for line in lines}) == len(lines)
    return len(lines), sum(line["prompt_tokens"] for line in lines), sum(line["output_tokens"] for line in lines)

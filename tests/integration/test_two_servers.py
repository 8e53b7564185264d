"""Two servers, each with an engine, on one Redis and one data directory: a change on one applies on the other."""

import contextlib
import itertools
import json
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_engine import first_token
from tests.support.management import add_adapter, client, complete, fake_adapter, new_key, offline_admin_key, token_ids
from tests.support.server_process import ServerProcess, run_command, serve_fake, stop, wait_until
from tests.support.valkey import running_valkey

ENDLESS = 1 << 25


@dataclass(frozen=True, slots=True)
class Pair:
    data_dir: Path
    a: ServerProcess
    b: ServerProcess
    admin_a: httpx.Client
    admin_b: httpx.Client


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    data_dir = folder / "data"
    key = offline_admin_key(data_dir)
    with running_valkey(folder) as valkey, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serve_fake(data_dir, "--redis-url", valkey.url)) for _ in range(2)]
        admins = [stack.enter_context(client(server, key)) for server in servers]
        yield Pair(data_dir, servers[0], servers[1], admins[0], admins[1])
        for server in servers:
            stop(server)


@pytest.fixture
def tenant(pair: Pair) -> str:
    """A tenant that no other test uses."""
    name = f"tenant-{secrets.token_hex(4)}"
    assert pair.admin_a.post("/v1/tenants", json={"id": name}).status_code == 201
    return name


@contextlib.contextmanager
def streaming(http: httpx.Client, model: str, max_tokens: int = ENDLESS) -> Iterator[Iterator[dict[str, Any]]]:
    """A stream whose first event has arrived."""
    body = {"model": model, "prompt": [1, 2], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        next(events)
        yield events


def last_of(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return [*events][-1]


def deleted(http: httpx.Client) -> list[dict[str, Any]]:
    return http.get("/v1/adapters", params={"state": "deleted"}).json()["data"]


class TestKeys:
    def test_a_key_made_on_one_works_on_the_other_at_once(self, pair: Pair, tenant: str) -> None:
        for _ in range(10):
            key = new_key(pair.admin_a, tenant, "infer")
            with client(pair.b, key["secret"]) as http:
                assert complete(http, "fake").status_code == 200

    def test_a_key_revoked_on_one_is_refused_by_the_others_next_request(self, pair: Pair, tenant: str) -> None:
        for _ in range(10):
            key = new_key(pair.admin_a, tenant, "infer")
            with client(pair.b, key["secret"]) as http:
                assert complete(http, "fake").status_code == 200
                assert pair.admin_a.delete(f"/v1/keys/{key['id']}").status_code == 204
                refused = complete(http, "fake")
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")

    def test_a_key_revoked_on_one_ends_the_others_streams(self, pair: Pair, tenant: str) -> None:
        key = new_key(pair.admin_a, tenant, "infer")
        with client(pair.b, key["secret"]) as http, streaming(http, "fake") as events:
            assert pair.admin_a.delete(f"/v1/keys/{key['id']}").status_code == 204
            assert last_of(events)["error"]["code"] == "invalid_api_key"

    def test_a_key_revoked_in_the_data_directory_ends_the_streams_of_both(self, pair: Pair, tenant: str) -> None:
        """Neither is notified; `test_catalog.py` tests how soon they notice."""
        key = new_key(pair.admin_a, tenant, "infer")
        with contextlib.ExitStack() as stack:
            streams = []
            for server in (pair.a, pair.b):
                http = stack.enter_context(client(server, key["secret"]))
                streams.append(stack.enter_context(streaming(http, "fake")))
            revoked = run_command("keys", "revoke", key["id"], "--data-dir", str(pair.data_dir))
            assert revoked.returncode == 0, revoked.stderr
            for events in streams:
                assert last_of(events)["error"]["code"] == "invalid_api_key"
            with client(pair.b, key["secret"]) as again:
                assert complete(again, "fake").status_code == 401

    def test_a_tenant_suspended_on_one_is_refused_and_its_streams_end_on_the_other(
        self, pair: Pair, tenant: str
    ) -> None:
        key = new_key(pair.admin_a, tenant, "infer")
        with client(pair.b, key["secret"]) as http:
            with streaming(http, "fake") as events:
                path = f"/v1/tenants/{tenant}"
                assert pair.admin_a.patch(path, json={"status": "suspended"}).status_code == 200
                refused = complete(http, "fake")
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_suspended")
                assert last_of(events)["error"]["code"] == "tenant_suspended"
            assert pair.admin_a.patch(path, json={"status": "active"}).status_code == 200
            assert complete(http, "fake").status_code == 200


class TestDeletedTenants:
    def test_a_tenant_deleted_on_one_is_unknown_to_both_until_it_is_restored(
        self, pair: Pair, tenant: str, tmp_path: Path
    ) -> None:
        key = new_key(pair.admin_a, tenant, "operator")["secret"]
        path = f"/v1/tenants/{tenant}"
        with client(pair.a, key) as on_a, client(pair.b, key) as on_b, contextlib.ExitStack() as stack:
            add_adapter(on_a, "skill", fake_adapter(tmp_path / "skill", 31))
            streams = [stack.enter_context(streaming(http, "skill")) for http in (on_a, on_b)]
            gone = pair.admin_a.delete(path)
            assert (gone.status_code, gone.json()["status"]) in {(200, "deleted"), (202, "draining")}
            for events in streams:
                assert (
                    last_of(events)["error"]["message"] == f"The tenant '{tenant}' was deleted while the request ran."
                )
            for server in (pair.a, pair.b):
                with client(server, key) as again:
                    refused = complete(again, "skill")
                    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            for admin in (pair.admin_a, pair.admin_b):
                wait_until(lambda admin=admin: admin.delete(path).status_code == 200, "all engines have let go")
                acting = admin.get("/v1/adapters", headers={"x-tenant": tenant})
                assert (acting.status_code, acting.json()["error"]["code"]) == (404, "not_found")
                wait_until(lambda admin=admin: tenant not in ids(admin), "it is in no list")
                assert tenant in ids(admin, deleted="true")
                # Its usage is still billed.
                used = admin.get("/v1/usage", params={"group_by": "tenant,adapter"}).json()["data"]
                assert (tenant, "skill") in {(row["tenant"], row["adapter"]) for row in used}
            taken = pair.admin_b.post("/v1/tenants", json={"id": tenant})
            assert taken.status_code == 409
            assert f"{path}/restore" in taken.json()["error"]["message"]
            assert pair.admin_b.post(f"{path}/restore").json()["status"] == "active"
            for server in (pair.b, pair.a):
                with client(server, key) as again:
                    assert complete(again, "skill").status_code == 200

    def test_a_server_killed_while_a_tenant_drains_leaves_the_tenant_deleted(self, tmp_path: Path) -> None:
        """The other server carries on without the notification that the killed one would have sent."""
        data_dir = tmp_path / "data"
        admin_key = offline_admin_key(data_dir)
        with running_valkey(tmp_path) as valkey, contextlib.ExitStack() as stack:
            killed, other = (stack.enter_context(serve_fake(data_dir, "--redis-url", valkey.url)) for _ in range(2))
            admin, beside = (
                stack.enter_context(client(killed, admin_key)),
                stack.enter_context(client(other, admin_key)),
            )
            assert admin.post("/v1/tenants", json={"id": "acme"}).status_code == 201
            http = stack.enter_context(client(other, new_key(admin, "acme", "infer")["secret"]))
            with streaming(http, "fake") as events:
                deleting = threading.Thread(target=lambda: _lost(admin, "/v1/tenants/acme"))
                deleting.start()
                wait_until(lambda: complete(http, "fake").status_code == 401, "the other has heard of it")
                killed.signal(signal.SIGKILL)
                killed.wait()
                deleting.join()
                assert last_of(events)["error"]["code"] == "not_found"
            wait_until(lambda: beside.delete("/v1/tenants/acme").json()["status"] == "deleted", "nothing of it runs")
            stop(other)


def _lost(http: httpx.Client, path: str) -> None:
    with contextlib.suppress(httpx.TransportError):
        http.delete(path)


def ids(admin: httpx.Client, **query: str) -> set[str]:
    return {found["id"] for found in admin.get("/v1/tenants", params={"limit": 500, **query}).json()["data"]}


class TestAdapters:
    def test_an_adapter_uploaded_to_one_is_served_by_the_other(self, pair: Pair, tenant: str, tmp_path: Path) -> None:
        key = new_key(pair.admin_a, tenant, "operator")["secret"]
        with client(pair.a, key) as on_a, client(pair.b, key) as on_b:
            for seed in range(5):
                added = add_adapter(on_a, f"skill-{seed}", fake_adapter(tmp_path / str(seed), seed))
                first = first_token(added["result"]["digest"])
                assert token_ids(complete(on_b, f"skill-{seed}", 3)) == [(first + step) % 250 for step in range(3)]

    def test_an_alias_moved_on_one_applies_to_the_others_next_request(
        self, pair: Pair, tenant: str, tmp_path: Path
    ) -> None:
        key = new_key(pair.admin_a, tenant, "operator")["secret"]
        with client(pair.a, key) as on_a, client(pair.b, key) as on_b:
            digests = {}
            for seed in (1, 2):
                result = add_adapter(on_a, "skill", fake_adapter(tmp_path / str(seed), seed))["result"]
                digests[result["version"]] = result["digest"]
            for turn in range(20):
                version = 1 + turn % 2
                moved = on_a.put("/v1/adapters/skill/aliases/live", json={"version": version})
                assert moved.status_code == 200
                answer = complete(on_b, "skill")
                assert answer.headers["x-adapter-version"] == str(version)
                assert token_ids(answer) == [first_token(digests[version])]

    def test_concurrent_moves_of_one_alias_leave_both_with_the_same_version(
        self, pair: Pair, tenant: str, tmp_path: Path
    ) -> None:
        key = new_key(pair.admin_a, tenant, "operator")["secret"]
        with client(pair.a, key) as on_a, client(pair.b, key) as on_b:
            for seed in range(1, 5):
                add_adapter(on_a, "skill", fake_adapter(tmp_path / str(seed), seed))
            statuses: list[int] = []

            def move(http: httpx.Client, versions: tuple[int, ...]) -> None:
                for version in versions * 8:
                    answer = http.put("/v1/adapters/skill/aliases/live", json={"version": version})
                    statuses.append(answer.status_code)

            together(lambda: move(on_a, (1, 3)), lambda: move(on_b, (2, 4)))
            assert set(statuses) <= {200, 409}
            revisions = {http.get("/v1/adapters/skill").json()["rev"] for http in (on_a, on_b)}
            versions = {complete(http, "skill").headers["x-adapter-version"] for http in (on_a, on_b)}
            assert (len(revisions), len(versions)) == (1, 1)

    def test_an_adapter_deleted_on_one_drains_on_both(self, pair: Pair, tenant: str, tmp_path: Path) -> None:
        """The other server's stream ends normally, no request starts, and the adapter is deleted after both drained."""
        key = new_key(pair.admin_a, tenant, "operator")["secret"]
        with client(pair.a, key) as on_a, client(pair.b, key) as on_b, client(pair.b, key) as beside:
            add_adapter(on_a, "skill", fake_adapter(tmp_path / "skill", 21))
            assert complete(on_a, "skill").status_code == 200
            answers: list[httpx.Response] = []
            with streaming(on_b, "skill", 1500) as events:
                deleting = threading.Thread(
                    target=lambda: answers.append(on_a.delete("/v1/adapters/skill", params={"drain_s": 60}))
                )
                deleting.start()
                wait_until(lambda: complete(beside, "skill").status_code == 404, "nothing new begins")
                assert not [answer for answer in answers if answer.json()["status"] == "deleted"]
                assert last_of(events)["choices"][0]["finish_reason"] == "length"
            deleting.join()
            assert (answers[0].status_code, answers[0].json()["status"]) in {(200, "deleted"), (202, "draining")}
            wait_until(lambda: [item["name"] for item in deleted(on_a)] == ["skill"], "both engines have let go")
            assert complete(on_a, "skill").status_code == 404

    def test_a_stream_that_outlives_the_drain_ends_on_the_other_server(
        self, pair: Pair, tenant: str, tmp_path: Path
    ) -> None:
        key = new_key(pair.admin_a, tenant, "operator")["secret"]
        with client(pair.a, key) as on_a, client(pair.b, key) as on_b:
            add_adapter(on_a, "skill", fake_adapter(tmp_path / "skill", 22))
            with streaming(on_b, "skill") as events:
                assert on_a.delete("/v1/adapters/skill", params={"drain_s": 0.5}).status_code in (200, 202)
                assert last_of(events)["error"]["code"] == "model_not_found"
            assert on_a.post("/v1/adapters/skill/restore").status_code == 200
            assert complete(on_b, "skill").status_code == 200


class TestLimits:
    def test_requests_are_counted_across_both_servers(self, pair: Pair, tenant: str) -> None:
        key = new_key(pair.admin_a, tenant, "infer", limits={"requests_per_min": 6})["secret"]
        with client(pair.a, key) as on_a, client(pair.b, key) as on_b:
            statuses = [complete(http, "fake").status_code for http in (on_a, on_b) * 5]
        # A bucket of 6 per minute refills one every 10 s.
        assert statuses[:6] == [200] * 6
        assert 429 in statuses[6:8]

    def test_running_requests_are_counted_across_both_servers(self, pair: Pair, tenant: str) -> None:
        key = new_key(pair.admin_a, tenant, "infer", limits={"max_concurrent": 2})["secret"]
        with client(pair.a, key) as on_a, client(pair.b, key) as on_b:
            with (
                streaming(on_a, "fake"),
                streaming(on_b, "fake"),
                client(pair.a, key) as beside_a,
                client(pair.b, key) as beside_b,
            ):
                refused = [complete(http, "fake").status_code for http in (beside_a, beside_b)]
            assert refused == [429, 429]
            wait_until(lambda: complete(on_a, "fake").status_code == 200, "what was left counts no more")


class TestUsage:
    def test_every_request_is_counted_once_and_both_report_the_same_usage(self, pair: Pair, tenant: str) -> None:
        key = new_key(pair.admin_a, tenant, "operator")
        with client(pair.a, key["secret"]) as on_a, client(pair.b, key["secret"]) as on_b:

            def ask_and_look(http: httpx.Client) -> None:
                """Reading the usage adds up the logs, so both servers do that at the same time."""
                for _ in range(30):
                    assert complete(http, "fake", 3).status_code == 200
                    assert http.get("/v1/usage").status_code == 200

            together(lambda: ask_and_look(on_a), lambda: ask_and_look(on_b))

            def usage(http: httpx.Client) -> list[tuple[int, int, int]]:
                rows = http.get("/v1/usage", params={"group_by": "key"}).json()["data"]
                return [(row["num_requests"], row["num_prompt_tokens"], row["num_output_tokens"]) for row in rows]

            for http in (on_a, on_b):
                wait_until(lambda http=http: usage(http) == [(60, 120, 180)], "all is counted")


def test_if_the_server_that_runs_redis_is_killed_the_other_takes_over(tmp_path: Path) -> None:
    """Without --redis-url: the first server runs a private Redis that both use."""
    key = offline_admin_key(tmp_path)
    with serve_fake(tmp_path) as a, serve_fake(tmp_path) as b, client(a, key) as admin_a, client(b, key) as admin_b:
        made = new_key(admin_a, "default", "infer")
        revoked = new_key(admin_a, "default", "infer")
        assert admin_a.delete(f"/v1/keys/{revoked['id']}").status_code == 204
        a.signal(signal.SIGKILL)
        a.wait()
        # The first attempt may reach the disk and then find Redis gone: its name is taken from then on.
        names = (f"new-{number}" for number in itertools.count())
        wait_until(lambda: admin_b.post("/v1/tenants", json={"id": next(names)}).status_code == 201, "management works")
        with client(b, made["secret"]) as good, client(b, revoked["secret"]) as bad:
            wait_until(lambda: complete(good, "fake").status_code == 200, "keys are served")
            assert complete(bad, "fake").status_code == 401
        stop(b)


def together(*works: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

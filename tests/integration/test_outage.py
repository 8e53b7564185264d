"""Redis is slow, gone, back, back with older data, replaced or emptied: what a server still serves, and what never."""

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraserve.control.tenancy.offline_keys import revoke_key_offline
from loraserve.live.key_names import DEFAULT_PREFIX, KeyNames
from loraserve.store.documents import DocumentStore
from tests.support.delay_proxy import proxy_of_a_thread
from tests.support.fake_engine import first_token
from tests.support.management import add_adapter, client, complete, fake_adapter, new_key, offline_admin_key, token_ids
from tests.support.server_process import ServerProcess, serve_fake, wait_until
from tests.support.valkey import Valkey, running_valkey

LONG_GRACE = ("--redis-grace-s", "600")
ENDLESS = 1 << 25


@dataclass(frozen=True, slots=True)
class Bench:
    server: ServerProcess
    valkey: Valkey
    admin: httpx.Client


@contextlib.contextmanager
def bench(folder: Path, *args: str, is_persistent: bool = False) -> Iterator[Bench]:
    data_dir = folder / "data"
    key = offline_admin_key(data_dir)
    with (
        running_valkey(folder, is_persistent=is_persistent) as valkey,
        serve_fake(data_dir, "--redis-url", valkey.url, *args) as server,
        client(server, key) as admin,
    ):
        yield Bench(server, valkey, admin)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def is_ready(http: httpx.Client) -> bool:
    return http.get("/health/ready").status_code == 200


def save(server: Valkey) -> None:
    """Waits for a save attempt, successful or not."""
    assert server.command("BGSAVE").startswith("+")
    wait_until(lambda: "rdb_bgsave_in_progress:0" in server.command("INFO", "persistence"), "it has tried")


@pytest.mark.parametrize("how", ["gone", "slow"])
class TestWithinTheGrace:
    def test_known_keys_are_served_and_nothing_can_be_changed(self, tmp_path: Path, how: str) -> None:
        with bench(tmp_path, *LONG_GRACE) as found:
            add_adapter(found.admin, "skill", fake_adapter(tmp_path / "skill", 1))
            known, unknown = (new_key(found.admin, "default", "operator") for _ in range(2))
            with client(found.server, known["secret"]) as http, client(found.server, unknown["secret"]) as stranger:
                assert complete(http, "skill").status_code == 200
                end(found.valkey, how)
                assert [complete(http, "skill").status_code for _ in range(5)] == [200] * 5
                assert code_of(complete(stranger, "skill")) == (503, "service_unavailable")
                for method, path, body in (
                    ("POST", "/v1/keys", {"role": "infer", "tenant": "default"}),
                    ("DELETE", f"/v1/keys/{known['id']}", None),
                    ("PUT", "/v1/adapters/skill/aliases/next", {"version": 1}),
                    ("DELETE", "/v1/adapters/skill", None),
                    ("PATCH", "/v1/tenants/default", {"status": "suspended"}),
                ):
                    refused = found.admin.request(method, path, json=body)
                    assert code_of(refused) == (503, "service_unavailable"), path
                    assert int(refused.headers["retry-after"]) >= 1
                assert found.admin.get("/v1/adapters/skill").json()["aliases"][0]["alias"] == "live"
                assert is_ready(found.admin)
                wait_until(lambda: "Redis is not reachable: " in found.server.text, "the log says so")
                assert complete(http, "skill").status_code == 200, "nothing was revoked, suspended or deleted unseen"
                bring_back(found.valkey, how)
                wait_until(lambda: complete(stranger, "skill").status_code == 200, "all are served again")
                wait_until(lambda: "Redis is reachable again" in found.server.text, "the log says that, too")
                assert found.admin.delete(f"/v1/keys/{known['id']}").status_code == 204
                assert complete(http, "skill").status_code == 401

    def test_limits_are_counted_by_the_server_itself(self, tmp_path: Path, how: str) -> None:
        with bench(tmp_path, *LONG_GRACE) as found:
            key = new_key(found.admin, "default", "infer", limits={"requests_per_min": 4})
            with client(found.server, key["secret"]) as http:
                assert complete(http, "fake").status_code == 200
                end(found.valkey, how)
                statuses = [complete(http, "fake").status_code for _ in range(7)]
                assert statuses[:4] == [200] * 4
                assert 429 in statuses[4:6]


class TestBeyondTheGrace:
    def test_only_running_requests_continue_until_redis_is_back(self, tmp_path: Path) -> None:
        with bench(tmp_path, "--redis-grace-s", "1") as found, contextlib.ExitStack() as stack:
            key = new_key(found.admin, "default", "operator")["secret"]
            http, beside = (stack.enter_context(client(found.server, key)) for _ in range(2))
            with streaming(beside, ENDLESS) as events:
                found.valkey.kill()
                wait_until(lambda: complete(http, "fake").status_code == 503, "the grace is over")
                refused = complete(http, "fake")
                assert code_of(refused) == (503, "service_unavailable")
                assert int(refused.headers["retry-after"]) >= 1
                assert http.get("/v1/adapters").status_code == 200
                assert found.admin.get("/health").status_code == 200
                assert not is_ready(found.admin)
                assert "choices" in next(events)
                found.valkey.start()
                wait_until(lambda: is_ready(found.admin), "a load balancer that sent nothing meanwhile is told")
                assert complete(http, "fake").status_code == 200
                assert "choices" in next(events)

    def test_metrics_report_redis_gone_and_back_without_any_request(self, tmp_path: Path) -> None:
        with bench(tmp_path, *LONG_GRACE) as found:

            def is_told(is_up: str) -> bool:
                return f"\nloraserve_redis_up {is_up}\n" in found.admin.get("/metrics").text

            assert is_told("1.0")
            found.valkey.kill()
            wait_until(lambda: is_told("0.0"), "it is gone")
            found.valkey.start()
            wait_until(lambda: is_told("1.0"), "it is back")

    def test_nothing_is_served_without_redis_if_the_grace_is_zero(self, tmp_path: Path) -> None:
        with bench(tmp_path, "--redis-grace-s", "0") as found:
            assert complete(found.admin, "fake").status_code == 200
            found.valkey.kill()
            assert [complete(found.admin, "fake").status_code for _ in range(3)] == [503] * 3
            found.valkey.start()
            wait_until(lambda: complete(found.admin, "fake").status_code == 200, "Redis is back")

    def test_a_redis_that_cannot_save_counts_as_gone_and_the_log_gives_the_reason(self, tmp_path: Path) -> None:
        """It then refuses writes, so no request can be admitted."""
        in_its_way = tmp_path / "dump.rdb" / "a folder"
        with bench(tmp_path, "--redis-grace-s", "1") as found:
            assert complete(found.admin, "fake").status_code == 200
            in_its_way.mkdir(parents=True)
            found.valkey.command("CONFIG", "SET", "save", "3600 1")
            save(found.valkey)
            wait_until(lambda: not is_ready(found.admin), "a load balancer sends it nothing more")
            assert code_of(complete(found.admin, "fake")) == (503, "service_unavailable")
            assert "\nloraserve_redis_up 0.0\n" in found.admin.get("/metrics").text
            assert "Redis is not reachable: Redis refused: MISCONF" in found.server.text
            in_its_way.rmdir()
            in_its_way.parent.rmdir()
            save(found.valkey)
            wait_until(lambda: is_ready(found.admin), "it can save again")
            assert complete(found.admin, "fake").status_code == 200

    def test_a_redis_that_no_longer_allows_scripts_counts_as_gone(self, tmp_path: Path) -> None:
        """It answers and accepts writes, but no request can be admitted."""
        with bench(tmp_path, "--redis-grace-s", "1") as found:
            assert complete(found.admin, "fake").status_code == 200
            assert found.valkey.command("ACL", "SETUSER", "default", "-eval", "-evalsha") == "+OK\r\n"
            wait_until(lambda: not is_ready(found.admin), "a load balancer sends it nothing more")
            assert code_of(complete(found.admin, "fake")) == (503, "service_unavailable")
            assert not is_ready(found.admin)
            assert found.valkey.command("ACL", "SETUSER", "default", "+@all") == "+OK\r\n"
            wait_until(lambda: is_ready(found.admin), "it may again")
            assert complete(found.admin, "fake").status_code == 200


class TestAFullRedis:
    def test_requests_are_served_changes_are_refused_and_a_full_redis_is_reported(self, tmp_path: Path) -> None:
        with bench(tmp_path, "--redis-grace-s", "0") as found:

            def is_told(is_full: str) -> bool:
                return f"\nloraserve_redis_full {is_full}\n" in found.admin.get("/metrics").text

            assert is_told("0.0")
            assert found.valkey.command("CONFIG", "SET", "maxmemory", "1") == "+OK\r\n"
            wait_until(lambda: is_told("1.0"), "it is full")
            assert "\nloraserve_redis_up 1.0\n" in found.admin.get("/metrics").text
            told = found.admin.get("/v1/live").json()
            assert (told["redis"], [engine["id"] for engine in told["engines"]]) == ("full", ["engine-0"])
            assert is_ready(found.admin)
            assert complete(found.admin, "fake").status_code == 200
            assert code_of(found.admin.patch("/v1/tenants/default", json={"status": "suspended"}))[0] == 503
            assert found.valkey.command("CONFIG", "SET", "maxmemory", "0") == "+OK\r\n"
            wait_until(lambda: is_told("0.0"), "there is room again")
            assert found.admin.get("/v1/live").json()["redis"] == "ready"

    def test_a_key_revoked_on_disk_does_not_make_a_full_redis_count_as_gone(self, tmp_path: Path) -> None:
        """Otherwise, with no grace, all requests would be refused each time Redis rejects the document."""
        with bench(tmp_path, "--redis-grace-s", "0") as found:
            key = new_key(found.admin, "default", "infer")
            assert found.valkey.command("CONFIG", "SET", "maxmemory", "1") == "+OK\r\n"
            revoke_key_offline(DocumentStore(tmp_path / "data"), key["id"])
            with client(found.server, key["secret"]) as http:
                wait_until(lambda: complete(http, "fake").status_code == 401, "it is found revoked")
            rev, names = "$1\r\n2\r\n", KeyNames(DEFAULT_PREFIX)
            assert found.valkey.command("HGET", names.document("key", key["id"]), "rev") != rev
            # On a busy machine Redis may answer too late, which counts as no answer if there is no grace.
            ready = [is_ready(found.admin) and complete(found.admin, "fake").status_code == 200 for _ in range(20)]
            assert sum(ready) > 15
            assert "Redis is not reachable: Redis refused" not in found.server.text
            assert found.valkey.command("CONFIG", "SET", "maxmemory", "0") == "+OK\r\n"
            wait_until(
                lambda: found.valkey.command("HGET", names.document("key", key["id"]), "rev") == rev,
                "Redis is told once it has room",
            )


class TestAnOlderRedis:
    def test_an_older_redis_undoes_neither_a_revocation_nor_an_alias_move(self, tmp_path: Path) -> None:
        """As after restoring Redis from a copy or failing over to a replica that lags."""
        with bench(tmp_path, *LONG_GRACE, is_persistent=True) as found, contextlib.ExitStack() as stack:
            append_only, copy = found.valkey.socket_path.parent / "appendonlydir", tmp_path / "copy"
            revoked, good = (new_key(found.admin, "default", "operator") for _ in range(2))
            as_revoked, as_good = (stack.enter_context(client(found.server, key["secret"])) for key in (revoked, good))
            digests = [
                add_adapter(found.admin, "skill", fake_adapter(tmp_path / str(seed), seed))["result"]["digest"]
                for seed in (1, 2)
            ]
            assert complete(as_revoked, "skill").status_code == 200
            shutil.copytree(append_only, copy)
            assert found.admin.delete(f"/v1/keys/{revoked['id']}").status_code == 204
            assert as_good.put("/v1/adapters/skill/aliases/live", json={"version": 1}).status_code == 200
            assert code_of(complete(as_revoked, "skill")) == (401, "invalid_api_key")
            found.valkey.kill()
            shutil.rmtree(append_only)
            copy.rename(append_only)
            found.valkey.start()
            for _ in range(20):
                assert complete(as_revoked, "skill").status_code == 401
            wait_until(lambda: complete(as_good, "skill").status_code == 200, "Redis is back")
            assert token_ids(complete(as_good, "skill")) == [first_token(digests[0])]
            assert complete(as_revoked, "skill").status_code == 401
            names = KeyNames(DEFAULT_PREFIX)
            rev = found.valkey.command("HGET", names.document("key", revoked["id"]), "rev")
            assert rev == "$1\r\n2\r\n", "Redis was told of the newer revision"

    def test_a_server_that_starts_on_an_older_redis_refuses_a_revoked_key(self, tmp_path: Path) -> None:
        data_dir = tmp_path / "data"
        admin_key = offline_admin_key(data_dir)
        append_only, copy = data_dir / "kv" / "appendonlydir", tmp_path / "copy"
        with serve_fake(data_dir) as server, client(server, admin_key) as admin:
            revoked = new_key(admin, "default", "infer")
            with client(server, revoked["secret"]) as http:
                assert complete(http, "fake").status_code == 200
            shutil.copytree(append_only, copy)
            assert admin.delete(f"/v1/keys/{revoked['id']}").status_code == 204
            server.signal(signal.SIGTERM)
            server.wait()
        shutil.rmtree(append_only)
        copy.rename(append_only)
        with serve_fake(data_dir) as server, client(server, revoked["secret"]) as http:
            assert code_of(complete(http, "fake")) == (401, "invalid_api_key")


class TestAFailover:
    @pytest.mark.parametrize("stale_data", ["yes", "no"])
    def test_the_server_continues_with_the_new_primary_and_revoked_keys_stay_revoked(
        self, tmp_path: Path, stale_data: str
    ) -> None:
        """The address leads to the new primary; the old one stays up as a replica, and so do all sockets to it."""
        data_dir = tmp_path / "data"
        key = offline_admin_key(data_dir)
        with contextlib.ExitStack() as stack:
            (tmp_path / "first").mkdir()
            first = stack.enter_context(running_valkey(tmp_path / "first", is_persistent=True))
            address = stack.enter_context(proxy_of_a_thread(tmp_path, first.socket_path))
            options = ("--redis-url", address.url, "--redis-grace-s", "1")
            server = stack.enter_context(serve_fake(data_dir, *options))
            admin = stack.enter_context(client(server, key))
            revoked, good = (new_key(admin, "default", "operator") for _ in range(2))
            as_revoked, as_good = (stack.enter_context(client(server, key["secret"])) for key in (revoked, good))
            assert complete(as_revoked, "fake").status_code == 200
            # The new primary's data when it takes over: it lags.
            shutil.copytree(tmp_path / "first" / "appendonlydir", tmp_path / "second" / "appendonlydir")
            assert admin.delete(f"/v1/keys/{revoked['id']}").status_code == 204
            assert complete(as_good, "fake").status_code == 200
            second = stack.enter_context(running_valkey(tmp_path / "second", is_persistent=True))
            first.command("CONFIG", "SET", "replica-serve-stale-data", stale_data)
            first.demote()
            wait_until(lambda: complete(as_good, "fake").status_code == 503, "the grace is over")
            num_revisions = len([*data_dir.glob("docs/*/*/*/*.json")])
            assert code_of(admin.delete(f"/v1/keys/{good['id']}")) == (503, "service_unavailable")
            assert len([*data_dir.glob("docs/*/*/*/*.json")]) == num_revisions, "nothing is changed"
            address.target = second.socket_path
            wait_until(lambda: complete(as_good, "fake").status_code == 200, "the new primary is found")
            assert code_of(complete(as_revoked, "fake")) == (401, "invalid_api_key")
            rev = second.command("HGET", KeyNames(DEFAULT_PREFIX).document("key", revoked["id"]), "rev")
            assert rev == "$1\r\n2\r\n", "it was told of the newer revision"
            assert admin.delete(f"/v1/keys/{good['id']}").status_code == 204
            assert code_of(complete(as_good, "fake")) == (401, "invalid_api_key")


class TestAnEmptiedRedis:
    def test_documents_and_usage_survive_an_emptied_redis(self, tmp_path: Path) -> None:
        with bench(tmp_path, *LONG_GRACE) as found, contextlib.ExitStack() as stack:
            good, revoked = (new_key(found.admin, "default", "operator") for _ in range(2))
            as_good, as_revoked = (stack.enter_context(client(found.server, key["secret"])) for key in (good, revoked))
            for seed in (1, 2):
                digest = add_adapter(as_good, "skill", fake_adapter(tmp_path / str(seed), seed))["result"]["digest"]
            for _ in range(7):
                assert complete(as_good, "skill", 3).status_code == 200
            assert complete(as_revoked, "skill", 5).status_code == 200
            assert found.admin.delete(f"/v1/keys/{revoked['id']}").status_code == 204
            shown, before = declared(as_good), usage_of(found.admin)
            assert before == {good["id"]: (7, 14, 21), revoked["id"]: (1, 2, 5)}
            for number in range(1, 4):
                assert found.valkey.command("FLUSHALL") == "+OK\r\n"
                assert usage_of(found.admin) == {**before, good["id"]: (6 + number, 12 + 2 * number, 18 + 3 * number)}
                assert token_ids(complete(as_good, "skill", 3))[0] == first_token(digest)
                assert complete(as_revoked, "skill").status_code == 401
                assert declared(as_good) == shown


def end(valkey: Valkey, how: str) -> None:
    if how == "gone":
        valkey.kill()
    else:
        valkey.process.send_signal(signal.SIGSTOP)


def bring_back(valkey: Valkey, how: str) -> None:
    if how == "gone":
        valkey.start()
    else:
        valkey.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def streaming(http: httpx.Client, max_tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    """A stream whose first event has arrived."""
    body = {"model": "fake", "prompt": [1, 2], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        next(events)
        yield events


def declared(http: httpx.Client) -> dict[str, Any]:
    shown = http.get("/v1/adapters/skill").json()
    return {name: shown[name] for name in ("versions", "aliases", "rev")} | {
        "versions": [(version["n"], version["digest"]) for version in shown["versions"]]
    }


def usage_of(admin: httpx.Client) -> dict[str, tuple[int, int, int]]:
    """Requests, prompt and output tokens by key, once every log has been added up."""
    found: dict[str, Any] = {"complete": False}

    def is_complete() -> bool:
        nonlocal found
        found = admin.get("/v1/usage", params={"group_by": "key"}).json()
        return found["complete"]

    wait_until(is_complete, "the logs were added up")
    counts = ("num_requests", "num_prompt_tokens", "num_output_tokens")
    return {row["key_id"]: tuple(row[count] for count in counts) for row in found["data"]}

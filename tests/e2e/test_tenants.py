"""A server with tenants and keys: a tenant's uploads, requests and views are isolated from those of other tenants."""

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.adapter_variants import twin
from tests.support.demo_questions import ADAPTER_DIR, user
from tests.support.server_process import WAIT_S, ServerProcess, run_command, serve, stop, wait_until

FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    key: str
    http: httpx.Client


@dataclass(frozen=True, slots=True)
class Keyed:
    server: ServerProcess
    admin_key: str
    admin: httpx.Client
    acme: Tenant
    globex: Tenant


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """Started as an operator would: the first admin key is created offline and used to create everything else."""
    own_dir = tmp_path_factory.mktemp("keyed")
    created = run_command("keys", "create", "--role", "admin", "--data-dir", str(own_dir), "--json")
    assert created.returncode == 0, created.stderr
    admin_key = json.loads(created.stdout)["secret"]
    with serve(own_dir) as server, client(server, admin_key) as admin:
        for name in ("acme", "globex"):
            assert admin.post("/v1/tenants", json={"id": name}).status_code == 201
        keys = [key_for(admin, name, "operator") for name in ("acme", "globex")]
        with client(server, keys[0]) as acme, client(server, keys[1]) as globex:
            yield Keyed(server, admin_key, admin, Tenant("acme", keys[0], acme), Tenant("globex", keys[1], globex))
        stop(server)


def client(server: ServerProcess, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=WAIT_S)


def key_for(admin: httpx.Client, tenant: str, role: str, **options: Any) -> str:
    created = admin.post("/v1/keys", json={"role": role, "tenant": tenant, **options})
    assert created.status_code == 201, created.text
    return created.json()["secret"]


def ask(http: httpx.Client, model: str, content: str = "hello world", **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": user(content), "temperature": 0, "max_tokens": 40, **fields}
    return http.post("/v1/chat/completions", json=body)


def answer(http: httpx.Client, model: str, content: str = "hello world") -> str:
    response = ask(http, model, content)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def add_by_curl(keyed: Keyed, key: str, name: str, folder: Path, *options: str) -> dict[str, Any]:
    """Adds an adapter with the documented curl command."""
    command = [
        "curl",
        "-sS",
        f"{keyed.server.url}/v1/adapters",
        "-H",
        f"Authorization: Bearer {key}",
        "-F",
        f"name={name}",
    ]
    for file in FILES:
        command += ["-F", f"files=@{folder / file}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=WAIT_S, check=True)
    return json.loads(done.stdout)


def open_upload(http: httpx.Client, name: str, folder: Path) -> httpx.Response:
    files = [{"name": file, "size_bytes": (folder / file).stat().st_size} for file in FILES]
    return http.post(f"/v1/adapters/{name}/uploads", json={"files": files})


def cli(keyed: Keyed, key: str, *args: str) -> subprocess.CompletedProcess[str]:
    return run_command(*args, "--url", keyed.server.url, "--api-key", key)


class TestIsolation:
    def test_adapters_of_two_tenants_with_one_name_never_answer_for_each_other(
        self, keyed: Keyed, tmp_path: Path
    ) -> None:
        """Requests are interleaved and concurrent, so that both tenants are in the same batches."""
        for tenant, skill in ((keyed.acme, "uppercase"), (keyed.globex, "reverse")):
            added = cli(keyed, tenant.key, "adapter", "add", "skill", str(ADAPTER_DIR / skill))
            assert added.returncode == 0, added.stderr
        answers: dict[str, list[str]] = {"acme": [], "globex": []}

        def ask_all(tenant: Tenant) -> None:
            for _ in range(12):
                answers[tenant.name].append(answer(tenant.http, "skill"))

        threads = [
            threading.Thread(target=ask_all, args=(tenant,)) for tenant in (keyed.acme, keyed.globex) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {"acme": ["HELLO WORLD"] * 24, "globex": ["dlrow olleh"] * 24}

    def test_foreign_and_missing_adapters_get_the_same_answers(self, keyed: Keyed, tmp_path: Path) -> None:
        add_by_curl(keyed, keyed.acme.key, "secret", twin(tmp_path / "secret", "spell"))
        assert answer(keyed.acme.http, "secret") == "h-e-l-l-o w-o-r-l-d"
        globex = keyed.globex.http
        for method, path, body in (
            ("GET", "/v1/models/{}", None),
            ("GET", "/v1/adapters/{}", None),
            ("GET", "/v1/adapters/{}/versions", None),
            ("GET", "/v1/adapters/{}/versions/1/report", None),
            ("GET", "/v1/adapters/{}/versions/1/files/adapter_config.json", None),
            ("PATCH", "/v1/adapters/{}", {"enabled": False}),
            ("POST", "/v1/adapters/{}/rollback", {}),
            ("PUT", "/v1/adapters/{}/aliases/live", {"version": 1}),
            ("PUT", "/v1/adapters/{}/residency", {"tier": "device"}),
            ("DELETE", "/v1/adapters/{}/versions/1", None),
            ("DELETE", "/v1/adapters/{}", None),
            ("GET", "/adapters/{}/v1/models", None),
        ):
            foreign = globex.request(method, path.format("secret"), json=body)
            missing = globex.request(method, path.format("nosuch"), json=body)
            assert (foreign.status_code, foreign.text) == (404, missing.text.replace("nosuch", "secret")), path
        refused = ask(globex, "secret")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "secret" not in [model["id"] for model in globex.get("/v1/models").json()["data"]]
        assert "secret" not in [item["name"] for item in globex.get("/v1/adapters").json()["data"]]
        assert answer(keyed.acme.http, "secret") == "h-e-l-l-o w-o-r-l-d"

    def test_tenants_share_no_cached_prefix(self, keyed: Keyed) -> None:
        """The same adapter, the same long prompt: the second tenant computes it for itself."""
        content = "red apple " * 20
        cached = [
            ask(tenant.http, "rot13", content).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for tenant in (keyed.acme, keyed.acme, keyed.globex, keyed.globex)
        ]
        assert [bool(count) for count in cached] == [False, True, False, True]

    def test_shared_adapters_are_usable_by_all_but_changed_only_by_server_admins(self, keyed: Keyed) -> None:
        for tenant in (keyed.acme, keyed.globex):
            assert answer(tenant.http, "reverse") == "dlrow olleh"
        refused = keyed.acme.http.patch("/v1/adapters/reverse", json={"description": "mine"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        changed = keyed.admin.patch(
            "/v1/adapters/reverse", json={"description": "backwards"}, headers={"x-tenant": "shared"}
        )
        assert changed.json()["description"] == "backwards"


class TestVersions:
    def test_new_content_under_a_name_answers_at_once_without_cached_prefixes(
        self, keyed: Keyed, tmp_path: Path
    ) -> None:
        acme, content = keyed.acme, "blue sky " * 20
        first = add_by_curl(keyed, acme.key, "helper", twin(tmp_path / "a", "uppercase"))
        assert (first["state"], first["result"]["version"]) == ("ready", 1)
        assert answer(acme.http, "helper") == "HELLO WORLD"
        usages = [ask(acme.http, "helper", content).json()["usage"] for _ in range(2)]
        assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 0
        second = add_by_curl(keyed, acme.key, "helper", twin(tmp_path / "b", "reverse"))
        assert second["result"]["version"] == 2
        response = ask(acme.http, "helper", content)
        assert response.headers["x-adapter-version"] == "2"
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer(acme.http, "helper") == "dlrow olleh"
        assert answer(acme.http, "helper@v1") == "HELLO WORLD"
        again = add_by_curl(keyed, acme.key, "helper", tmp_path / "a", "-F", "activate=false")
        assert again["result"] == {**first["result"], "created": False}
        assert answer(acme.http, "helper") == "dlrow olleh"

    def test_the_command_line_manages_an_adapter_from_upload_to_rollback_and_deletion(
        self, keyed: Keyed, tmp_path: Path
    ) -> None:
        key, http = keyed.globex.key, keyed.globex.http

        def run(*args: str) -> str:
            done = cli(keyed, key, "adapter", *args)
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert "poet@v1 is ready" in run("add", "poet", str(twin(tmp_path / "one", "spell")))
        assert "poet@v2 is ready" in run("add", "poet", str(twin(tmp_path / "two", "rot13")), "--no-activate")
        assert answer(http, "poet") == "h-e-l-l-o w-o-r-l-d"
        assert "poet@next is v2" in run("alias", "poet", "next", "2")
        assert answer(http, "poet@next") == "uryyb jbeyq"
        run("alias", "poet", "live", "2")
        assert answer(http, "poet") == "uryyb jbeyq"
        run("rollback", "poet")
        assert answer(http, "poet") == "h-e-l-l-o w-o-r-l-d"
        shown = json.loads(run("show", "poet", "--json"))
        assert [version["n"] for version in shown["versions"]] == [2, 1]
        assert {alias["alias"]: alias["version"] for alias in shown["aliases"]} == {"live": 1, "next": 2}
        run("pin", "poet", "--ttl-s", "60")
        assert json.loads(run("list", "--json", "-q", "poet"))[0]["pin"]["tier"] == "device"
        assert "poet stays on host until it is unpinned" in run("pin", "poet", "--tier", "host", "--ttl-s", "none")
        run("remove", "poet")
        assert ask(http, "poet").status_code == 404
        run("restore", "poet")
        assert answer(http, "poet") == "h-e-l-l-o w-o-r-l-d"

    def test_the_command_line_deletes_and_restores_a_tenant(self, keyed: Keyed, tmp_path: Path) -> None:
        assert keyed.admin.post("/v1/tenants", json={"id": "initech"}).status_code == 201
        key = key_for(keyed.admin, "initech", "operator")

        def run(*args: str) -> str:
            done = cli(keyed, keyed.admin_key, "tenants", *args)
            assert done.returncode == 0, done.stderr
            return done.stdout

        with client(keyed.server, key) as http:
            add_by_curl(keyed, key, "poet", twin(tmp_path / "one", "spell"))
            assert answer(http, "poet") == "h-e-l-l-o w-o-r-l-d"
            told = run("remove", "initech")
            assert told.startswith("initech is deleted")
            assert "`loraserve tenants restore initech` undoes it for 24 hours" in told
            assert ask(http, "poet").status_code == 401
            assert "initech" not in run("list")
            (shown,) = json.loads(run("list", "--deleted", "--json"))
            assert (shown["id"], shown["num_adapters"], shown["num_keys"]) == ("initech", 1, 1)
            assert "initech" in run("list", "--deleted")
            assert run("restore", "initech") == "initech is active\n"
            assert answer(http, "poet") == "h-e-l-l-o w-o-r-l-d"
            refused = cli(keyed, keyed.admin_key, "tenants", "remove", "shared")
            assert refused.returncode == 1
            assert "'shared' is a built-in tenant and cannot be deleted." in refused.stderr

    def test_a_canary_is_sticky_for_each_user(self, keyed: Keyed, tmp_path: Path) -> None:
        http = keyed.acme.http
        for number, skill in enumerate(("uppercase", "reverse"), start=1):
            add_by_curl(keyed, keyed.acme.key, "split", twin(tmp_path / str(number), skill), "-F", "activate=false")
        path = "/v1/adapters/split/aliases/live"
        body = {"version": 1, "canary": {"version": 2, "weight_bp": 5000}}
        assert http.put(path, json=body).status_code == 200
        seen = {}
        for number in range(20):
            versions = {ask(http, "split", user=f"user {number}").headers["x-adapter-version"] for _ in range(2)}
            assert len(versions) == 1, "one user, one version"
            seen[number] = versions.pop()
        assert set(seen.values()) == {"1", "2"}
        http.put(path, json={"version": 1, "canary": {"version": 2, "weight_bp": 9000}})
        for number, version in seen.items():
            if version == "2":
                assert ask(http, "split", user=f"user {number}").headers["x-adapter-version"] == "2"
        assert http.put(path, json={"version": 1}).status_code == 200
        assert {ask(http, "split", user=f"user {number}").headers["x-adapter-version"] for number in seen} == {"1"}


class TestUploads:
    def test_a_rejected_upload_reports_why_and_leaves_nothing(self, keyed: Keyed, tmp_path: Path) -> None:
        folder = twin(tmp_path / "bad", "spell")
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "use_qalora": True}))
        error = add_by_curl(keyed, keyed.acme.key, "bad", folder)["error"]
        assert error["code"] == "adapter_rejected"
        (failure,) = [check for check in error["report"]["checks"] if check["status"] == "fail"]
        assert (failure["file"], failure["key"]) == ("adapter_config.json", "use_qalora")
        assert failure["remedy"]
        refused = cli(keyed, keyed.acme.key, "adapter", "add", "bad", str(folder))
        assert refused.returncode == 1
        assert "use_qalora" in refused.stderr
        assert keyed.acme.http.get("/v1/adapters/bad").status_code == 404

    def test_chunks_resume_where_they_stopped_and_a_commit_can_be_repeated(self, keyed: Keyed, tmp_path: Path) -> None:
        http, folder = keyed.acme.http, twin(tmp_path / "one", "reverse")
        data = {name: (folder / name).read_bytes() for name in FILES}
        asked = {"files": [{"name": name, "size_bytes": len(content)} for name, content in data.items()]}
        created = http.post("/v1/adapters/chunked/uploads", json=asked, headers={"idempotency-key": "only once"})
        assert created.status_code == 201
        session = created.json()
        replayed = http.post("/v1/adapters/chunked/uploads", json=asked, headers={"idempotency-key": "only once"})
        assert replayed.json()["id"] == session["id"]
        path = f"/v1/uploads/{session['id']}"
        early = http.post(f"{path}/commit")
        assert (early.status_code, early.json()["error"]["code"]) == (409, "upload_state")
        assert http.put(f"{path}/files/{FILES[0]}", content=data[FILES[0]]).json()["offset"] == len(data[FILES[0]])
        weights = data[FILES[1]]
        for start, end in ((0, 100_000), (100_000, 250_000)):
            headers = {"content-range": f"bytes {start}-{end - 1}/{len(weights)}"}
            sent = http.put(f"{path}/files/{FILES[1]}", content=weights[start:end], headers=headers)
            assert sent.json()["offset"] == end
        wrong = http.put(
            f"{path}/files/{FILES[1]}",
            content=weights[:10],
            headers={"content-range": f"bytes 0-9/{len(weights)}"},
        )
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "upload_offset")
        headers = {"content-range": f"bytes 250000-250009/{len(weights) + 1}"}
        other = http.put(f"{path}/files/{FILES[1]}", content=weights[250_000:250_010], headers=headers)
        assert (other.status_code, other.json()["error"]["param"]) == (400, "Content-Range")
        assert str(len(weights) + 1) in other.json()["error"]["message"]
        offset = next(file["offset"] for file in http.get(path).json()["files"] if file["name"] == FILES[1])
        assert offset == 250_000
        headers = {"content-range": f"bytes {offset}-{len(weights) - 1}/{len(weights)}"}
        http.put(f"{path}/files/{FILES[1]}", content=weights[offset:], headers=headers)
        assert http.get("/v1/adapters/chunked").status_code == 404, "nothing is visible before the commit"
        assert http.post(f"{path}/commit").status_code == 202
        wait_until(lambda: http.get(path, params={"wait_s": 5}).json()["state"] == "ready", "the adapter is ready")
        result = http.post(f"{path}/commit").json()["result"]
        assert (result["version"], result["created"]) == (1, True)
        assert answer(http, "chunked") == "dlrow olleh"
        downloaded = http.get(f"/v1/adapters/chunked/versions/1/files/{FILES[1]}")
        assert downloaded.content == weights

    def test_an_upload_session_can_continue_after_a_broken_connection(self, keyed: Keyed, tmp_path: Path) -> None:
        http, folder = keyed.acme.http, twin(tmp_path / "one", "arithmetic")
        data = {name: (folder / name).read_bytes() for name in FILES}
        asked = {"files": [{"name": name, "size_bytes": len(content)} for name, content in data.items()]}
        path = f"/v1/uploads/{http.post('/v1/adapters/broken/uploads', json=asked).json()['id']}"
        http.put(f"{path}/files/{FILES[0]}", content=data[FILES[0]])
        weights, url = data[FILES[1]], httpx.URL(keyed.server.url)
        head = f"PUT {path}/files/{FILES[1]} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {keyed.acme.key}\r\n"
        for target, start in ((head, b""), (head.replace(f"PUT {path}/files/{FILES[1]}", "POST /v1/adapters"), b"--x")):
            form = "Content-Type: multipart/form-data; boundary=x\r\n" if start else ""
            with socket.create_connection((url.host, url.port or 80)) as connection:
                connection.sendall(f"{target}{form}Content-Length: {len(weights)}\r\n\r\n".encode() + start)
                connection.sendall(weights[:10_000])
        wait_until(lambda: http.get(path).json()["state"] == "open", "the server noticed")
        assert http.put(f"{path}/files/{FILES[1]}", content=weights).json()["offset"] == len(weights)
        http.post(f"{path}/commit")
        wait_until(lambda: http.get(path, params={"wait_s": 5}).json()["state"] == "ready", "the adapter is ready")


class TestKeys:
    def test_each_role_allows_only_its_own_actions(self, keyed: Keyed) -> None:
        statuses = {}
        for role in ("infer", "viewer", "operator", "admin"):
            with client(keyed.server, key_for(keyed.admin, "acme", role)) as http:
                statuses[role] = (
                    ask(http, "rot13").status_code,
                    http.get("/v1/adapters").status_code,
                    http.patch("/v1/adapters/nosuch", json={"tags": []}).status_code,
                    http.get("/v1/keys").status_code,
                    http.post("/v1/tenants", json={"id": "new"}).status_code,
                    http.get("/metrics").status_code,
                )
        assert statuses == {
            "infer": (200, 403, 403, 403, 403, 403),
            "viewer": (403, 200, 403, 403, 403, 403),
            "operator": (200, 200, 404, 403, 403, 403),
            "admin": (200, 200, 404, 200, 403, 403),
        }
        assert keyed.admin.get("/metrics").status_code == 200

    def test_a_key_limited_to_some_adapters_can_neither_upload_others_nor_see_their_uploads(
        self, keyed: Keyed, tmp_path: Path
    ) -> None:
        folder = twin(tmp_path / "listed", "spell")
        before = open_upload(keyed.acme.http, "unlisted", folder).json()
        with client(keyed.server, key_for(keyed.admin, "acme", "operator", adapters=["listed"])) as http:
            for name in ("unlisted", "nosuch", "rot13"):
                refused = open_upload(http, name, folder)
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
                assert f"'{name}'" in refused.json()["error"]["message"]
                assert "'listed'" in refused.json()["error"]["message"]
            refused = add_by_curl(keyed, http.headers["authorization"].split()[1], "unlisted", folder)
            assert refused["error"]["code"] == "forbidden"
            assert http.get(f"/v1/uploads/{before['id']}").status_code == 404
            assert http.post(f"/v1/uploads/{before['id']}/commit").status_code == 404
            assert http.delete(f"/v1/uploads/{before['id']}").status_code == 404
            allowed = open_upload(http, "listed", folder).json()
            assert [upload["id"] for upload in http.get("/v1/uploads").json()["data"]] == [allowed["id"]]
        assert {upload["id"] for upload in keyed.acme.http.get("/v1/uploads").json()["data"]} >= {
            before["id"],
            allowed["id"],
        }

    def test_revoking_a_key_ends_its_streams_and_refuses_its_next_request(self, keyed: Keyed) -> None:
        created = keyed.admin.post("/v1/keys", json={"role": "infer", "tenant": "acme"}).json()
        body = {"model": "spell", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with (
            client(keyed.server, created["secret"]) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            assert "choices" in json.loads(next(lines).removeprefix("data: "))
            assert keyed.admin.delete(f"/v1/keys/{created['id']}").status_code == 204
            refused = http.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert events[-1]["error"]["code"] == "invalid_api_key"

    def test_a_rotation_without_grace_ends_all_earlier_secrets_of_the_key(self, keyed: Keyed) -> None:
        created = keyed.admin.post("/v1/keys", json={"role": "infer", "tenant": "acme"}).json()
        rotated = keyed.admin.post(f"/v1/keys/{created['id']}/rotate", json={"grace_s": 600}).json()
        too_long = keyed.admin.post(f"/v1/keys/{created['id']}/rotate", json={"grace_s": 10**400})
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "grace_s")
        at_once = keyed.admin.post(f"/v1/keys/{created['id']}/rotate", json={"grace_s": 0}).json()
        statuses = [
            httpx.get(f"{keyed.server.url}/v1/models", headers={"x-api-key": key["secret"]}).status_code
            for key in (created, rotated, at_once)
        ]
        assert statuses == [401, 401, 200]

    def test_rate_limits_are_enforced_with_a_retry_after_header(self, keyed: Keyed) -> None:
        key = key_for(keyed.admin, "acme", "infer", limits={"requests_per_min": 2})
        with client(keyed.server, key) as http:
            responses = [ask(http, "rot13", max_tokens=1) for _ in range(3)]
        assert [response.status_code for response in responses] == [200, 200, 429]
        assert [response.headers["x-ratelimit-limit-requests"] for response in responses] == ["2"] * 3
        assert responses[2].json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(responses[2].headers["retry-after"]) <= 60

    def test_a_replayed_creation_shows_the_key_but_not_its_secret(self, keyed: Keyed) -> None:
        headers, body = {"idempotency-key": "a key for the cook"}, {"role": "infer", "tenant": "acme"}
        first, second = (keyed.admin.post("/v1/keys", json=body, headers=headers).json() for _ in range(2))
        assert first["secret"]
        assert second == {**first, "secret": None}
        other = keyed.admin.post("/v1/keys", json={**body, "name": "x"}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")

    def test_a_change_based_on_an_outdated_etag_is_refused(self, keyed: Keyed) -> None:
        path = "/v1/tenants/globex"
        seen = keyed.admin.get(path)
        etag = seen.headers["etag"]
        assert keyed.admin.get(path, headers={"if-none-match": etag}).status_code == 304
        changed = keyed.admin.patch(path, json={"description": "changed"}, headers={"if-match": etag})
        assert changed.status_code == 200
        assert changed.headers["etag"] != etag
        stale = keyed.admin.patch(path, json={"description": "lost"}, headers={"if-match": etag})
        assert (stale.status_code, stale.json()["error"]["code"]) == (412, "precondition_failed")
        assert keyed.admin.get(path).json()["description"] == "changed"


def test_a_server_that_others_can_reach_does_not_start_without_an_admin_key(tmp_path: Path) -> None:
    done = run_command("serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert "loraserve keys create --role admin --data-dir" in done.stderr

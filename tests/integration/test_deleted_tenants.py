"""Deleting and restoring a tenant over HTTP: who may do it, what the answers are, and what stays visible."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.management import add_adapter, client, complete, fake_adapter, new_key, offline_admin_key
from tests.support.server_process import ServerProcess, serve_fake, stop, wait_until

METRICS = "/metrics"


@dataclass(frozen=True, slots=True)
class Keyed:
    server: ServerProcess
    admin: httpx.Client


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    data_dir = tmp_path_factory.mktemp("keyed") / "data"
    key = offline_admin_key(data_dir)
    with serve_fake(data_dir) as server, client(server, key) as admin:
        yield Keyed(server, admin)
        stop(server)


@pytest.fixture
def tenant(keyed: Keyed, request: pytest.FixtureRequest) -> str:
    """A new tenant, for this test alone."""
    name = request.node.name.replace("_", "-")[:60]
    assert keyed.admin.post("/v1/tenants", json={"id": name}).status_code == 201
    return name


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_only_an_admin_of_all_tenants_may_delete_or_restore(keyed: Keyed, tenant: str) -> None:
    key = new_key(keyed.admin, tenant, "admin")["secret"]
    with client(keyed.server, key) as http:
        for path in (f"/v1/tenants/{tenant}", "/v1/tenants/default", "/v1/tenants/missing"):
            assert refusal(http.delete(path))[:2] == (403, "forbidden")
            assert refusal(http.post(f"{path}/restore"))[:2] == (403, "forbidden")
        assert http.get(f"/v1/tenants/{tenant}").json()["status"] == "active"
    assert refusal(keyed.admin.delete("/v1/tenants/shared"))[:2] == (409, "conflict")
    assert refusal(keyed.admin.delete("/v1/tenants/missing"))[:2] == (404, "not_found")


def test_delete_and_restore_refuse_a_stale_if_match(keyed: Keyed, tenant: str) -> None:
    path = f"/v1/tenants/{tenant}"
    old = {"if-match": keyed.admin.get(path).headers["etag"]}
    newer = {"if-match": keyed.admin.patch(path, json={"weight": 2}).headers["etag"]}
    assert keyed.admin.delete(path, headers=old).status_code == 412
    deleted = keyed.admin.delete(path, headers=newer)
    assert (deleted.status_code, deleted.json()["status"]) == (200, "deleted")
    assert keyed.admin.get(path).json() == deleted.json()
    assert keyed.admin.post(f"{path}/restore", headers=newer).status_code == 412
    restored = keyed.admin.post(f"{path}/restore", headers={"if-match": deleted.headers["etag"]})
    assert (restored.status_code, restored.json()["weight"], restored.json()["deleted_at"]) == (200, 2, None)


def test_only_an_admin_of_all_tenants_sees_a_deleted_tenant(keyed: Keyed, tenant: str, tmp_path: Path) -> None:
    admin, path = keyed.admin, f"/v1/tenants/{tenant}"
    secret = new_key(admin, tenant, "operator")["secret"]
    with client(keyed.server, secret) as http, client(keyed.server, "") as browser:
        add_adapter(http, "skill", fake_adapter(tmp_path / "skill", 41))
        assert complete(http, "skill").status_code == 200
        browser.headers.pop("authorization")
        origin = {"origin": keyed.server.url}
        assert browser.post("/v1/session", json={"key": secret}, headers=origin).status_code == 200
        assert browser.get("/v1/adapters").status_code == 200
        label = f'adapter="{tenant}/skill"'
        wait_until(lambda: label in admin.get(METRICS).text, "its adapter is counted")

        assert admin.delete(path).status_code == 200

        assert label not in admin.get(METRICS).text
        assert refusal(browser.get("/v1/adapters"))[:2] == (401, "invalid_api_key")
        assert refusal(http.get("/v1/models"))[:2] == (401, "invalid_api_key")
        assert refusal(admin.get("/v1/models", headers={"x-tenant": tenant})) == (404, "not_found", "X-Tenant")
        assert tenant not in {key["tenant"] for key in admin.get("/v1/keys", params={"limit": 500}).json()["data"]}
        assert tenant not in {found["id"] for found in admin.get("/v1/tenants").json()["data"]}
        assert refusal(admin.patch(path, json={"weight": 3}))[:2] == (404, "not_found")
        assert refusal(admin.post("/v1/keys", json={"role": "infer", "tenant": tenant}))[:2] == (404, "not_found")
        shown = admin.get(path).json()
        assert (shown["status"], shown["num_adapters"], shown["num_keys"]) == ("deleted", 1, 1)
        newest = admin.get("/v1/audit", params={"action": "tenant.delete", "limit": 1}).json()["data"][0]
        assert (newest["subject"], newest["before"]["deleted_at"], newest["after"]["deleted_at"]) == (
            tenant,
            None,
            shown["deleted_at"],
        )

        assert admin.post(f"{path}/restore").status_code == 200
        assert complete(http, "skill").status_code == 200
        assert browser.get("/v1/adapters").status_code == 200


def test_an_open_upload_continues_after_a_restoration(keyed: Keyed, tenant: str, tmp_path: Path) -> None:
    folder = fake_adapter(tmp_path / "skill", 42)
    files = [{"name": path.name, "size_bytes": path.stat().st_size} for path in folder.iterdir()]
    with client(keyed.server, new_key(keyed.admin, tenant, "operator")["secret"]) as http:
        opened = http.post("/v1/adapters/skill/uploads", json={"files": files}).json()
        first, *rest = sorted(folder.iterdir())
        assert put(http, opened["id"], first).status_code == 200
        keyed.admin.delete(f"/v1/tenants/{tenant}")
        assert refusal(put(http, opened["id"], rest[0]))[:2] == (401, "invalid_api_key")
        assert keyed.admin.post(f"/v1/tenants/{tenant}/restore").status_code == 200
        for path in rest:
            assert put(http, opened["id"], path).status_code == 200
        assert http.post(f"/v1/uploads/{opened['id']}/commit").status_code == 202
        ready = http.get(f"/v1/uploads/{opened['id']}", params={"wait_s": 30})
        assert ready.json()["state"] == "ready"


def put(http: httpx.Client, upload: str, path: Path) -> httpx.Response:
    headers = {"content-type": "application/octet-stream"}
    return http.put(f"/v1/uploads/{upload}/files/{path.name}", content=path.read_bytes(), headers=headers)

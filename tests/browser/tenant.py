"""A tenant with keys, and the API calls that prepare a view for it."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.server_process import WAIT_S

FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    operator_key: str
    http: httpx.Client
    """Authenticated as the tenant's operator."""
    admin: httpx.Client
    """Authenticated as an admin of the whole server."""

    @classmethod
    def create(cls, name: str, url: str, admin: httpx.Client, stack: ExitStack) -> "Tenant":
        key = key_for(admin, name, "operator")
        return cls(name, key, stack.enter_context(client(url, key)), admin)

    def key(self, role: str, **options: Any) -> str:
        return key_for(self.admin, self.name, role, **options)

    def add(self, name: str, folder: Path, *, activate: bool = True) -> int:
        """Uploads an adapter and returns the number of its new version."""
        files = [{"name": file, "size_bytes": (folder / file).stat().st_size} for file in FILES]
        opened = self.http.post(f"/v1/adapters/{name}/uploads", json={"files": files, "activate": activate})
        assert opened.status_code == 201, opened.text
        path = f"/v1/uploads/{opened.json()['id']}"
        for file in FILES:
            content = (folder / file).read_bytes()
            headers = {
                "content-type": "application/octet-stream",
                "content-range": f"bytes 0-{len(content) - 1}/{len(content)}",
            }
            sent = self.http.put(f"{path}/files/{file}", content=content, headers=headers)
            assert sent.status_code == 200, sent.text
        assert self.http.post(f"{path}/commit").status_code < 300
        while (session := self.http.get(path, params={"wait_s": 10}).json())["state"] in ("validating", "loading"):
            pass
        assert session["state"] == "ready", session
        return session["result"]["version"]


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=WAIT_S)


def key_for(admin: httpx.Client, tenant: str, role: str, **options: Any) -> str:
    created = admin.post("/v1/keys", json={"role": role, "tenant": tenant, **options})
    assert created.status_code == 201, created.text
    return created.json()["secret"]

"""An operator's actions on a running server (keys, tenants, adapters), and a tenant's requests."""

from pathlib import Path
from typing import Any

import httpx
from loraserve_adapters.base_layout import BaseLayout

from loraserve.control.tenancy.offline_keys import create_key_offline
from loraserve.store.documents import DocumentStore
from loraserve.store.records import ANY_TENANT, Role
from tests.support.server_process import WAIT_S, ServerProcess
from tests.unit.adapters.folders import config_of, lora_tensors, tiny_layout, write_folder

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def offline_admin_key(data_dir: Path) -> str:
    """Creates the first key like `loraserve keys create --data-dir`, without that command's 1.2 s of one core."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return create_key_offline(DocumentStore(data_dir), role=Role.ADMIN, tenant=ANY_TENANT).text


def client(server: ServerProcess, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=WAIT_S)


def new_key(admin: httpx.Client, tenant: str, role: str, **options: Any) -> dict[str, Any]:
    """The key as the server returns it, with its secret."""
    created = admin.post("/v1/keys", json={"role": role, "tenant": tenant, **options})
    assert created.status_code == 201, created.text
    return created.json()


def add_adapter(http: httpx.Client, name: str, folder: Path, **form: str) -> dict[str, Any]:
    """Uploads it in one multipart request; returns the upload, which is ready."""
    files = [("files", (file, (folder / file).read_bytes())) for file in ADAPTER_FILES]
    response = http.post("/v1/adapters", data={"name": name, **form}, files=files)
    assert response.status_code == 201, response.text
    return response.json()


def fake_adapter(folder: Path, seed: int, layout: BaseLayout | None = None) -> Path:
    """An adapter for the fake engine's base model; another seed gives other content."""
    return write_folder(folder, config_of(), lora_tensors(layout or tiny_layout(), ["q_proj"], seed=seed))


def complete(http: httpx.Client, model: str, max_tokens: int = 1, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": [1, 2], "max_tokens": max_tokens, "return_token_ids": True, **fields}
    return http.post("/v1/completions", json=body)


def token_ids(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]

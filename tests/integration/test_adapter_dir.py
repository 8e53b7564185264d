"""Folders that are added to `--adapter-dir`, or change there, while a server runs."""

import shutil
import time
from pathlib import Path

import httpx

from tests.support.management import client, complete, fake_adapter, offline_admin_key
from tests.support.server_process import serve_fake, stop, wait_until


def live(http: httpx.Client) -> dict[str, int]:
    """Numbers of the live versions, by adapter name."""
    adapters = http.get("/v1/adapters", headers={"x-tenant": "shared"}).json()["data"]
    return {adapter["name"]: adapter["live"]["n"] for adapter in adapters}


def test_new_folders_are_served_once_complete_and_deleted_adapters_stay_deleted(tmp_path: Path) -> None:
    folder, aside = tmp_path / "adapters", tmp_path / "aside"
    fake_adapter(folder / "first", 1)
    key = offline_admin_key(tmp_path / "data")
    options = ("--adapter-dir", str(folder), "--adapter-dir-scan-s", "0.1")
    with serve_fake(tmp_path / "data", *options) as server, client(server, key) as http:
        assert live(http) == {"first": 1}
        fake_adapter(aside, 2)
        (folder / "second").mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(aside / name, folder / "second" / name)
            time.sleep(0.3)
        wait_until(lambda: live(http) == {"first": 1, "second": 1}, "the new folder")
        assert complete(http, "second").status_code == 200

        fake_adapter(folder / "first", 3)
        wait_until(lambda: live(http) == {"first": 2, "second": 1}, "the changed one")

        deleted = http.delete("/v1/adapters/second", headers={"x-tenant": "shared"})
        assert deleted.is_success, deleted.text
        (folder / "third").mkdir()
        (folder / "third" / "adapter_model.safetensors").write_bytes(b"no header")
        shutil.copy(aside / "adapter_config.json", folder / "third")
        wait_until(lambda: "adapter 'third' from" in server.text, "the reason why it is not served")
        fake_adapter(folder / "fourth", 4)
        wait_until(lambda: "fourth" in live(http), "another new folder")
        assert live(http) == {"first": 2, "fourth": 1}
        assert server.text.count("adapter 'third' from") == 1
        stop(server)


def test_folders_that_are_refused_at_the_start_are_told_and_served_once_they_are_whole(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    for seed, name in enumerate(("good", "half", "my adapter")):
        fake_adapter(folder / name, seed)
    weights = folder / "half" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    key = offline_admin_key(tmp_path / "data")
    options = ("--adapter-dir", str(folder), "--adapter-dir-scan-s", "0.1")
    with serve_fake(tmp_path / "data", *options) as server, client(server, key) as http:
        assert live(http) == {"good": 1}
        for name in ("half", "my adapter"):
            assert server.text.count(f"adapter '{name}' from") == 1
        wait_until(lambda: "note      2 of 3 folders in --adapter-dir refused" in server.text, "the note")
        weights.write_bytes(whole)
        wait_until(lambda: live(http) == {"good": 1, "half": 1}, "the folder that is whole now")
        stop(server)

"""The packed files of adapters are a cache: a lost or half-made one does no harm."""

import os
from pathlib import Path

import httpx

from loraserve.engine.request import EngineErrorCode
from tests.support.fake_engine_client import FakeEngine
from tests.support.live_server import live_server, make_settings
from tests.support.management import add_adapter, client, complete, fake_adapter, offline_admin_key, token_ids
from tests.support.server_process import serve_fake, stop


def test_a_lost_packed_file_is_made_again_from_the_content(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    key = offline_admin_key(data_dir)
    with serve_fake(data_dir) as server, client(server, key) as http:
        add_adapter(http, "sql", fake_adapter(tmp_path / "sql", seed=1))
        before = token_ids(complete(http, "sql", max_tokens=4))
        stop(server)
    (packed,) = (data_dir / "packed").iterdir()
    content = packed.read_bytes()
    packed.unlink()
    half_made = data_dir / "packed" / f".{packed.name[:12]}-killed"
    half_made.mkdir()
    os.utime(half_made, (0, 0))
    with serve_fake(data_dir) as server, client(server, key) as http:
        assert not half_made.exists()
        assert token_ids(complete(http, "sql", max_tokens=4)) == before
        assert packed.read_bytes() == content
        stop(server)
    # A blob that can no longer be read is an error for that adapter only.
    packed.unlink()
    (weights,) = (data_dir / "blobs").rglob("adapter_model.safetensors")
    weights.chmod(0o600)
    weights.write_bytes(b"damaged")
    with serve_fake(data_dir) as server, client(server, key) as http:
        refused = complete(http, "sql")
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "adapter_unreadable"), refused.text
        assert complete(http, "fake").status_code == 200
        # Uploaded again, as the error says: this repairs the content, not only the file packed from it.
        assert add_adapter(http, "sql", tmp_path / "sql")["result"]["created"] is False
        stop(server)
    packed.unlink()
    with serve_fake(data_dir) as server, client(server, key) as http:
        assert token_ids(complete(http, "sql", max_tokens=4)) == before
        stop(server)


def test_a_packed_file_that_the_engine_cannot_read_is_repacked_for_the_next_request(tmp_path: Path) -> None:
    """Only the header of a packed file is read before the engine uses it."""
    engine = FakeEngine(fail_with="the payload differs", fail_code=EngineErrorCode.ADAPTER_UNREADABLE)
    with live_server(engine, make_settings(tmp_path), ("sql",)) as server:

        def error() -> tuple[str, str]:
            answer = httpx.post(f"{server.url}/v1/completions", json={"model": "sql", "prompt": "hi", "max_tokens": 2})
            assert answer.status_code == 500
            return answer.json()["error"]["code"], answer.json()["error"]["message"]

        code, message = error()
        assert code == "adapter_unreadable"
        assert "next request repacks its files" in message
        engine.fail_with = None
        # This adapter has only a packed file: the error that its files cannot be read shows that repacking was tried.
        assert error() == (
            "adapter_unreadable",
            "The adapter's files on this server cannot be read. Upload it again; the server's log says why.",
        )

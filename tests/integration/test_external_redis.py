"""A server that uses the operator's Redis: over TCP, with a password, in a separate database."""

import socket
from pathlib import Path

import httpx

from tests.support.management import add_adapter, complete, fake_adapter
from tests.support.server_process import WAIT_S, serve_fake, stop
from tests.support.valkey import Valkey, valkey

__all__ = ["valkey"]


def test_everything_works_over_tcp(tmp_path: Path, valkey: Valkey) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in (("port", str(port)), ("requirepass", "secret")):
        assert valkey.command("CONFIG", "SET", name, value) == "+OK\r\n"
    url = f"redis://:secret@127.0.0.1:{port}/3"
    with serve_fake(tmp_path / "data", "--redis-url", url) as server:
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
            assert http.get("/health/ready").status_code == 200
            add_adapter(http, "sql", fake_adapter(tmp_path / "sql", seed=1))
            assert complete(http, "sql").status_code == 200
            assert [item["name"] for item in http.get("/v1/adapters").json()["data"]] == ["sql"]
            assert http.get("/v1/usage").json()["data"][0]["num_requests"] == 1
        stop(server)
    assert "secret" not in server.text

"""`--metrics-port` of a real server: metrics without a key, and nothing else."""

import re
import socket
from pathlib import Path

import httpx

from tests.integration.test_serve import run_to_end
from tests.support.management import client, complete, offline_admin_key
from tests.support.server_process import ServerProcess, serve_fake, stop, wait_until


def metrics_url(server: ServerProcess) -> str:
    wait_until(lambda: "metrics without a key" in server.text, "it says where metrics are")
    found = re.search(r"metrics without a key: (http://\S+)/metrics", server.text)
    assert found is not None
    return found[1]


def test_the_metrics_port_serves_metrics_without_a_key_and_nothing_else(tmp_path: Path) -> None:
    key = offline_admin_key(tmp_path)
    with serve_fake(tmp_path, "--metrics-port", "0") as server, client(server, key) as admin:
        assert complete(admin, "fake").status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        with httpx.Client(base_url=metrics_url(server)) as anyone:
            scraped = anyone.get("/metrics")
            assert scraped.status_code == 200
            assert scraped.headers["x-request-id"]
            assert scraped.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert 'loraserve_requests_total{adapter="fake",finish_reason="length"} 1.0' in scraped.text
            assert anyone.get("/health").status_code == 200
            paths = ("/v1/models", "/v1/config", "/v1/live", "/ui/", "/schema/openapi.json", "/health/ready", "/")
            found = {path: anyone.get(path, headers={"authorization": f"Bearer {key}"}).status_code for path in paths}
            assert found == dict.fromkeys(paths, 404)
            asked = anyone.post("/v1/completions", json={"model": "fake", "prompt": [1]})
            assert asked.status_code == 404
            # A page that makes its own host name resolve to this server.
            rebound = anyone.get("/metrics", headers={"host": "attacker.example"})
            assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "forbidden")
            foreign = anyone.get("/metrics", headers={"sec-fetch-site": "cross-site"})
            assert foreign.status_code == 403
            stop(server)
    # A Prometheus on another machine may use any host name.
    with serve_fake(tmp_path, "--metrics-port", "0", "--metrics-host", "0.0.0.0") as server:
        called = httpx.get(f"{metrics_url(server)}/metrics", headers={"host": "loraserve:9400"})
        assert called.status_code == 200
        stop(server)


def test_one_port_for_both_is_a_one_line_error_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    code, output = run_to_end(tmp_path, "--port", port, "--metrics-port", port)
    assert code == 1
    assert output.strip() == "error: --port and --metrics-port are the same: choose another --metrics-port"


def test_a_taken_metrics_port_is_a_one_line_error_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = run_to_end(tmp_path, "--metrics-port", str(port))
    assert code == 1
    assert output.strip() == (
        f"error: port {port} on 127.0.0.1 is in use; stop the program that listens there "
        "or choose another --metrics-port"
    )

import sys
from contextlib import closing
from pathlib import Path

import arms
import httpx
import pytest
from arms import Server, Servers

COMMAND = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[2].encode())

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_servers_run_with_separate_data_directories_until_all_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "OUT", tmp_path)
    num_started = 0

    def server() -> Server:
        nonlocal num_started
        num_started += 1
        return Server([sys.executable, "-c", COMMAND, "{port}", "{data}"])

    with closing(Servers()) as servers:
        first, second, again = (servers.url(name, server) for name in ("one", "another", "one"))
        assert first == again != second
        assert num_started == 2
        folders = [httpx.get(f"{url}/health").raise_for_status().text for url in (first, second)]
        assert folders == [str(tmp_path / "data" / name) for name in ("one", "another")]
    for url in (first, second):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")

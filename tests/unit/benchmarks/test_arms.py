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

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_servers_stay_up_until_all_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "OUT", tmp_path)
    num_started = 0

    def server() -> Server:
        nonlocal num_started
        num_started += 1
        return Server([sys.executable, "-c", COMMAND, "{port}"])

    with closing(Servers()) as servers:
        first, second, again = (servers.url(name, server) for name in ("one", "another", "one"))
        assert first == again != second
        assert num_started == 2
        assert httpx.get(f"{first}/health").status_code == httpx.get(f"{second}/health").status_code == 200
    for url in (first, second):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")

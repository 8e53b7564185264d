"""Usage counters equal the logs, even if servers were killed or Redis was emptied in between."""

import signal
import threading
from collections import Counter
from pathlib import Path

import httpx
import msgspec

from loraserve.store.usage_log import UsageLine
from tests.support.server_process import ServerProcess, serve_fake, stop, wait_until
from tests.support.valkey import running_valkey

ROUNDS = 4
CLIENTS = 4


def logged(data_dir: Path) -> Counter[str]:
    """Sums of the logged lines, without torn ones."""
    sums: Counter[str] = Counter()
    for path in data_dir.glob("usage/*/*.jsonl"):
        for text in path.read_bytes().split(b"\n")[:-1]:
            line = msgspec.json.decode(text, type=UsageLine)
            sums["num_requests"] += 1
            sums["num_prompt_tokens"] += line.prompt_tokens
            sums["num_output_tokens"] += line.output_tokens
    return sums


def counted(server: ServerProcess) -> Counter[str] | None:
    """The reported sums; None until every log has been added up."""
    report = httpx.get(f"{server.url}/v1/usage", timeout=30)
    if report.status_code != 200 or not report.json()["complete"]:
        return None
    names = ("num_requests", "num_prompt_tokens", "num_output_tokens")
    return Counter({name: sum(row[name] for row in report.json()["data"]) for name in names})


def ask_until_gone(url: str, num_answered: list[int], enough: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=30) as http:
        while True:
            try:
                response = http.post("/v1/completions", json={"model": "fake", "prompt": [1, 2, 3], "max_tokens": 3})
            except httpx.HTTPError:
                return
            if response.status_code != 200:
                return
            num_answered.append(1)
            if len(num_answered) >= 20:
                enough.set()


def test_counters_equal_the_logs_after_kills_and_an_emptied_redis(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    num_answered: list[int] = []
    with running_valkey(tmp_path) as valkey:
        for round_number in range(ROUNDS):
            with serve_fake(data_dir, "--redis-url", valkey.url) as server:
                answered_now: list[int] = []
                enough = threading.Event()
                clients = [
                    threading.Thread(target=ask_until_gone, args=(server.url, answered_now, enough))
                    for _ in range(CLIENTS)
                ]
                for thread in clients:
                    thread.start()
                assert enough.wait(30)
                if round_number == 1:
                    assert valkey.command("FLUSHALL") == "+OK\r\n"
                server.signal(signal.SIGKILL)
                for thread in clients:
                    thread.join()
                num_answered += answered_now
        with serve_fake(data_dir, "--redis-url", valkey.url) as server:
            wait_until(lambda: counted(server) == logged(data_dir), "counters that equal the logs")
            sums = logged(data_dir)
            # A line is written when the last byte leaves: at most the requests in flight at a kill are missing.
            assert len(num_answered) - ROUNDS * CLIENTS <= sums["num_requests"]
            assert sums["num_prompt_tokens"] == 3 * sums["num_requests"]
            assert valkey.command("FLUSHALL") == "+OK\r\n"
            wait_until(lambda: counted(server) == sums, "the same counters after Redis was emptied")
            stop(server)

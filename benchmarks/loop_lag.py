"""How long large and hostile requests block the API's event loop.

A probe repeatedly requests /health/live over one connection and records the latencies, while another process sends one
kind of request for a few seconds. "idle" is the probe alone and shows the machine's own noise. The goal is that
nothing blocks the loop for more than 100 ms.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx

from loraserve.demo.skills import SKILLS

SECONDS = 4.0
NUM_SENDERS = 2
PAUSE_S = 0.001
ADAPTERS = Path(__file__).parents[1] / "loraserve" / "demo" / "adapters"

Request = tuple[str, bytes]
"""Path and body."""


def request(path: str, **fields: object) -> Request:
    return request_without_model(path, **{"model": "spell", **fields})


def request_without_model(path: str, **fields: object) -> Request:
    return path, json.dumps(fields, separators=(",", ":")).encode()


def chat(name: str) -> dict[str, object]:
    message = {"role": "user", "content": "hello world"}
    return {"model": name, "messages": [message], "max_tokens": 64, "ignore_eos": True, "stream": True}


CASES: dict[str, Callable[[], list[Request]]] = {
    "idle": list,
    "100k token ids, refused": lambda: [request("/v1/completions", prompt=[5] * 100_000)],
    "64 x 7k token ids, refused": lambda: [request("/v1/completions", prompt=[[5] * 7_000] * 64)],
    "1 MB text, refused": lambda: [request("/v1/completions", prompt="river " * 170_000)],
    "2 MB chat message, refused": lambda: [
        request("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 1_990_000}])
    ],
    "4096 messages, refused": lambda: [
        request("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 400}] * 4096)
    ],
    "body beyond 2 MB": lambda: [request("/v1/completions", prompt="x" * 2_100_000)],
    "2 MB of brackets": lambda: [("/v1/completions", b'{"metadata":' + b"[" * 1_900_000)],
    "2 MB of metadata": lambda: [
        request("/v1/completions", prompt="x", max_tokens=1, metadata=[{str(i): i} for i in range(100_000)])
    ],
    "1.9 MB of unknown keys": lambda: [request("/v1/completions", **{f"k{i}": i for i in range(90_000)})],
    "tokenize 1 MB": lambda: [request("/tokenize", prompt="river " * 170_000, return_token_strs=True)],
    "detokenize 390k ids": lambda: [request("/detokenize", tokens=[120] * 390_000)],
    "64 prompts, answered": lambda: [request("/v1/completions", prompt=["hello world"] * 64, max_tokens=8)],
    "64 prompts echoed with logprobs": lambda: [
        request("/v1/completions", prompt=["hello world " * 40] * 64, max_tokens=1, echo=True, logprobs=20)
    ],
    "8 choices with logprobs, streamed": lambda: [
        request("/v1/chat/completions", **chat("spell"), n=8, logprobs=True, top_logprobs=20)
    ],
    "loading and unloading": lambda: [
        request_without_model("/v1/load_lora_adapter", lora_name="guest", lora_path=str(ADAPTERS / "spell")),
        request_without_model("/v1/unload_lora_adapter", lora_name="guest"),
    ],
    "all adapters streaming": lambda: [
        request("/v1/chat/completions", **chat(name)) for name in SKILLS for _ in range(4)
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="A running server on the demo model. [one is started]")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="For each case.")
    parser.add_argument("--only", nargs="*", help="Names of cases.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, dict[str, float]] = {}
    with nullcontext(args.url) if args.url else started_server() as url:
        print(f"{'ms':34} {'probes':>7} {'p50':>7} {'p99':>7} {'max':>7}   answers")
        for name in args.only or CASES:
            latencies_ms, answers = measure(url, name, args.seconds)
            *_, p99 = statistics.quantiles(latencies_ms, n=100)
            report[name] = {"p50": statistics.median(latencies_ms), "p99": p99, "max": max(latencies_ms)}
            numbers = " ".join(f"{value:7.1f}" for value in report[name].values())
            print(f"{name:34} {len(latencies_ms):7} {numbers}   {answers}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))


def measure(url: str, name: str, seconds: float) -> tuple[list[float], dict[int, int]]:
    context = multiprocessing.get_context("spawn")
    ready, answers = context.Event(), context.SimpleQueue()
    sender = context.Process(target=send, args=(url, name, seconds, ready, answers))
    sender.start()
    ready.wait()
    latencies_ms = list(probe(url, seconds))
    sender.join()
    return latencies_ms, answers.get()


def probe(url: str, seconds: float) -> Iterator[float]:
    """Latencies in ms."""
    request = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            connection.sendall(request)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            yield (time.perf_counter() - start) * 1000
            time.sleep(PAUSE_S)


def send(url: str, name: str, seconds: float, ready: Event, answers: "SimpleQueue[dict[int, int]]") -> None:
    """Runs in a process of its own, so that the probe does not wait for it."""
    requests = CASES[name]()
    statuses: dict[int, int] = {}
    end = time.perf_counter() + seconds
    ready.set()
    senders = [threading.Thread(target=_send, args=(url, requests[i::NUM_SENDERS] or requests, end, statuses))
               for i in range(NUM_SENDERS if requests else 0)]  # fmt: skip
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    answers.put(statuses)


def _send(url: str, requests: list[Request], end: float, statuses: dict[int, int]) -> None:
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=url, timeout=120, headers=headers) as client:
        while time.perf_counter() < end:
            for path, body in requests:
                status = client.post(path, content=body).status_code
                statuses[status] = statuses.get(status, 0) + 1


@contextmanager
def started_server() -> Iterator[str]:
    import subprocess
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as data_dir:
        command = [sys.executable, "-m", "loraserve.cli.main", "serve", "--port", "0", "--num-threads", "1"]
        with subprocess.Popen([*command, "--data-dir", data_dir], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                ready = next(line for line in server.stdout if line.startswith("loraserve is ready"))
                yield ready.split()[-1]
            finally:
                server.terminate()


if __name__ == "__main__":
    main()

"""Priority: how long a user waits while the same tenant's file of requests fills the engine.

`loraserve batch` sends the file, without and with --priority 1 in turn; meanwhile one user asks again and again.

Run: loraserve serve --port 8123 --max-num-seqs 4 --data-dir DIR; then python benchmarks/bench_priority.py
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

PAUSE_S = 0.05
"""Between two questions of the user."""
WARM_UP_S = 3.0
"""From the start of the batch's process to the first question."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8123")
    parser.add_argument("--batch-model", default="spell")
    parser.add_argument("--user-model", default="uppercase")
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--num-tokens", type=int, default=400, help="Output tokens of each request of the file.")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with httpx.Client(base_url=args.url, timeout=300.0) as user, tempfile.TemporaryDirectory() as folder:
        requests = Path(folder) / "requests.jsonl"
        requests.write_text("".join(_line(args, number) for number in range(args.num_requests)))
        idle = [_ask(user, args.user_model) for _ in range(20)]
        print(json.dumps({"idle_median_s": round(statistics.median(idle), 4)}), flush=True)
        for repeat in range(args.repeats):
            for options in ([], ["--priority", "1"]):
                answers = Path(folder) / f"answers-{repeat}{len(options)}.jsonl"
                command = [requests, answers, "--url", args.url, "--concurrency", str(args.concurrency), *options]
                print(json.dumps(_measure(user, args.user_model, [*map(str, command)])), flush=True)


def _line(args: argparse.Namespace, number: int) -> str:
    body = {"model": args.batch_model, "prompt": f"word {number}", "max_tokens": args.num_tokens, "ignore_eos": True}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def _measure(user: httpx.Client, model: str, command: list[str]) -> dict[str, object]:
    began = time.perf_counter()
    batch = subprocess.Popen([sys.executable, "-m", "loraserve.cli.main", "batch", *command], stderr=subprocess.DEVNULL)
    time.sleep(WARM_UP_S)
    waits: list[float] = []
    while batch.poll() is None:
        waits.append(_ask(user, model))
        time.sleep(PAUSE_S)
    if batch.returncode != 0:
        raise SystemExit(f"the batch ended with {batch.returncode}")
    return {
        "options": command[-2:] if "--priority" in command else [],
        "median_s": round(statistics.median(waits), 4),
        "p95_s": round(sorted(waits)[int(0.95 * len(waits))], 4),
        "num_asked": len(waits),
        "batch_s": round(time.perf_counter() - began, 1),
    }


def _ask(user: httpx.Client, model: str) -> float:
    body = {"model": model, "messages": [{"role": "user", "content": "hello world"}], "temperature": 0}
    began = time.perf_counter()
    user.post("/v1/chat/completions", json=body).raise_for_status()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

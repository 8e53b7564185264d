"""Ours over HTTP and in process against PEFT and transformers, alternating, medians. `make bench` runs it.

Work: the 100 M-parameter Llama shape with random bfloat16 weights, prompts of 128 and outputs of 64 tokens ± spread,
16 requests at a time; either 16 adapters of ranks 8, 16, 32 on all linears in turn, or the base model alone. Every arm
is a process of its own on the same cores; over HTTP the API and the load generator share them with the engine.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import shapes
import torch

SHAPE = "llama-100m"
NUM_ADAPTERS = 16
HERE = Path(__file__).parent
OUT = HERE / "out"

Arm = Callable[[], float]
"""Runs once and returns output tokens per second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="Names of arms.")
    parser.add_argument("--json", type=Path, default=OUT / "serving.json")
    args = parser.parse_args()
    model = shapes.make_model(SHAPE, OUT)
    adapters = list(shapes.make_adapters(SHAPE, OUT, NUM_ADAPTERS).values())
    arms = _arms(model, adapters, args.num_requests, args.spread)
    if args.only:
        arms = {name: arm for name, arm in arms.items() if name in args.only}
    results: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(args.repeats):
        for name, arm in arms.items():
            results[name].append(arm())
            print(f"{repeat + 1}/{args.repeats} {name}: {results[name][-1]:.1f} tok/s", file=sys.stderr, flush=True)
    report = {
        "machine": _machine(),
        "work": {"shape": SHAPE, "num_requests": args.num_requests, "spread": args.spread, "concurrency": 16},
        "floor_tok_s": {
            name: 16 / (num_bytes / _read_bandwidth())
            for name, num_bytes in {
                "base": shapes.model_bytes(model),
                "mixed": shapes.model_bytes(model) + sum(map(shapes.adapter_bytes, adapters)),
            }.items()
        },
        "output_tok_s": {name: {"median": statistics.median(runs), "runs": runs} for name, runs in results.items()},
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table({name: statistics.median(runs) for name, runs in results.items()}))


def table(medians: dict[str, float]) -> str:
    """Markdown: each arm and its ratio to the library that does the same work."""
    rivals = {"mixed": "PEFT", "base": "transformers"}
    lines = ["| arm | output tok/s | ratio |", "|---|---|---|"]
    for name, value in medians.items():
        arm, _, mix = name.rpartition(" ")
        rival = f"{rivals[mix]} {mix}"
        ratio = f"{value / medians[rival]:.2f} × {rivals[mix]}" if rival in medians and name != rival else ""
        lines.append(f"| {arm}, {'16 adapters' if mix == 'mixed' else 'base only'} | {value:.0f} | {ratio} |")
    return "\n".join(lines)


def _arms(model: Path, adapters: list[Path], num_requests: int, spread: float) -> dict[str, Arm]:
    common = ["--model", str(model), "--num-requests", str(num_requests), "--spread", str(spread)]
    lora = ["--adapters", *map(str, adapters)]

    def script(name: str, *extra: str) -> Arm:
        return lambda: _run_script(HERE / name, [*common, *extra])

    return {
        "HTTP mixed": lambda: _http(model, adapters, num_requests, spread),
        "in process mixed": script("engine_in_process.py", *lora),
        "PEFT mixed": script("static_generate.py", *lora),
        "HTTP base": lambda: _http(model, [], num_requests, spread),
        "in process base": script("engine_in_process.py"),
        "transformers base": script("static_generate.py"),
    }


def _run_script(path: Path, arguments: list[str]) -> float:
    output = subprocess.run([sys.executable, str(path), *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(output.stdout.splitlines()[-1])["output_tokens_per_s"]


def _http(model: Path, adapters: list[Path], num_requests: int, spread: float) -> float:
    with tempfile.TemporaryDirectory() as folder, _server(model, adapters, Path(folder)) as url:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "loraserve.cli.main", "bench", "--url", url, "--json", str(report)]
        command += ["--adapters", "all" if adapters else "base", "--num-requests", str(num_requests)]
        command += ["--prompt-tokens", "128", "--prompt-spread", str(round(128 * spread))]
        command += ["--output-tokens", "64", "--output-spread", str(round(64 * spread))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        total = json.loads(report.read_text())["total"]
        assert total["num_failed"] == 0, f"{total['num_failed']} requests failed"
        return total["output_tokens_per_s"]


@contextmanager
def _server(model: Path, adapters: list[Path], folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "loraserve.cli.main", "serve", str(model), "--port", str(port)]
    command += ["--data-dir", str(folder / "data")]
    if adapters:
        command += ["--lora-modules", *(f"{path.name}={path}" for path in adapters)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not become ready (exit code {process.poll()})")


def _read_bandwidth() -> float:
    """Bytes per second of reading 400 MB with all cores: what the byte floor is made of."""
    data = torch.ones(100_000_000, dtype=torch.float32)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times)


def _machine() -> dict[str, object]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()

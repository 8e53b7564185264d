"""The real server as a user starts it: `loraserve serve` in its own process, by default on the bundled demo model."""

import atexit
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from loraserve_kernels.cpu_builds import private_directory
from prometheus_client.parser import text_string_to_metric_families

from tests.support.forked_process import ForkedProcess, ProcessForks

START_S = 240.0
"""The first start may compile kernels, on a busy machine."""
WAIT_S = 60.0
POLL_S = 0.02
ENGINES = (".engine_process", "/fake_engine.py")
"""Endings of the word in a command line that identifies an engine's process."""
PYTHON = (sys.executable, "-P")
SERVE_FAKE, SERVE_PATIENT = (Path(__file__).with_name(f"serve_{name}.py") for name in ("fake", "patient"))


def command(*args: str) -> list[str]:
    return [*PYTHON, "-m", "loraserve.cli.main", *args]


def environment() -> dict[str, str]:
    """Ours, without variables that configure a server or a client or name the test. Our packages are found even if they
    are not installed."""
    configuring = ("LORASERVE_", "VLLM_", "OPENAI_", "OTEL_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(configuring)}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200"}


def run_command(
    *args: str, stdin: str | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs to its end. variables: added to its environment."""
    env = environment() | (variables or {})
    return subprocess.run(
        command(*args), input=stdin, capture_output=True, text=True, timeout=START_S, env=env, check=False
    )


@dataclass(slots=True)
class ServerProcess:
    process: subprocess.Popen[str] | ForkedProcess
    output: list[str] = field(default_factory=list)
    """Lines of stdout and stderr."""
    url: str = ""

    @property
    def text(self) -> str:
        return "\n".join(self.output)

    def engine(self) -> psutil.Process:
        """The engine's process, not the private Redis or one that validates an adapter."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = (child for child in children if any(word.endswith(ENGINES) for word in child.cmdline()))
        return engine

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait until it ends; returns the exit code."""
        return self.process.wait(WAIT_S)

    def metrics(self) -> dict[str, float]:
        """By name; one with labels is summed over them."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self._metrics()):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def num_finished(self, reason: str) -> float:
        """Choices that finished for this reason."""
        line = re.search(rf'^vllm:request_success_total{{.*finished_reason="{reason}".*}} (.*)$', self._metrics(), re.M)
        assert line is not None
        return float(line[1])

    def num_referenced_blocks(self) -> float:
        metrics = self.metrics()
        names = ("loraserve_kv_blocks", "loraserve_kv_blocks_free", "loraserve_kv_blocks_cached")
        num_blocks, num_free, num_cached = (metrics[name] for name in names)
        return num_blocks - num_free - num_cached

    def is_idle(self) -> bool:
        """Nothing runs or waits, and no KV block is in use."""
        metrics = self.metrics()
        counts = ("loraserve_sequences_in_flight", "vllm:num_requests_running", "vllm:num_requests_waiting")
        return not any(metrics[name] for name in counts) and self.num_referenced_blocks() == 0

    def _metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(POLL_S)


@contextmanager
def serve(data_dir: Path, *args: str, variables: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server that is ready. Kills it on exit unless it has ended by then. variables: added to its environment."""
    share_kernels(data_dir / "kernels")
    options = ("--port", "0", "--num-threads", "1", "--no-certificates", "--data-dir", str(data_dir))
    words = [*PYTHON, str(SERVE_PATIENT), *options, *args]
    with _running(_started(words, environment() | (variables or {}))) as server:
        yield server


@contextmanager
def serve_fake(data_dir: Path, *args: str, variables: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Likewise, with the fake engine, whose base model is `fake`."""
    with _running(start_fake("--no-certificates", "--data-dir", str(data_dir), *args, variables=variables)) as server:
        yield server


def start_fake(*args: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str] | ForkedProcess:
    """The caller must end it. Its stdout also has its stderr."""
    words = ["fake", "--port", "0", *args]
    env, forks = environment() | (variables or {}), _fake_server_forks()
    # Variables, or files next to a server, may change what is imported: such servers do their own imports.
    return forks.start(words) if forks.can_start_in(env) else _started([*PYTHON, str(SERVE_FAKE), *words], env)


@functools.cache
def _fake_server_forks() -> ProcessForks:
    forks = ProcessForks([*PYTHON, "-m", "tests.support.fork_fake_servers"], environment())
    atexit.register(forks.close)
    return forks


def _started(words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def share_kernels(folder: Path) -> None:
    """Links `folder`, where a server looks for compiled kernels, to the one that the tests' engines use, so that not
    every data directory or home gets its own."""
    if not folder.exists():
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.symlink_to(private_directory(None))


@contextmanager
def _running(process: subprocess.Popen[str] | ForkedProcess) -> Iterator[ServerProcess]:
    server = ServerProcess(process)
    ready = threading.Event()
    reader = threading.Thread(target=_read, args=(server, ready))
    reader.start()
    try:
        assert ready.wait(START_S), server.text
        assert server.url, server.text
        yield server
    finally:
        process.kill()
        process.wait(WAIT_S)
        reader.join(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


def _read(server: ServerProcess, ready: threading.Event) -> None:
    for line in server.process.stdout or []:
        server.output.append(line.rstrip())
        if found := re.match(r"loraserve is ready: .*?(http://[^\s)]+)", line):
            server.url = found[1]
            ready.set()
    ready.set()


def stop(server: ServerProcess) -> None:
    """Stops it as an operator does; asserts a clean end that leaves no process behind."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0, server.text
    assert not any(child.is_running() for child in children), "a process outlived the server"
    assert "Traceback" not in server.text

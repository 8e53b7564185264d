"""All arms, in run order. Arms that a goal compares are close together, so that both run under the same conditions."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import shapes
from arms import (
    HERE,
    Arm,
    Server,
    Turn,
    last_line,
    llama_cpp,
    load_test,
    loraserve,
    model_options,
    output_lines,
    over_http,
    running,
)
from arms import script as library
from arms import vllm as vllm_server
from work import OUT, Work

NUM_REGISTERED = 2000
QWEN = "Qwen3 fp32"
PREFIXES = "2k prefixes"


@dataclass(frozen=True, slots=True)
class Rivals:
    """Paths of rivals that need a separate installation; None = leave that rival out."""

    vllm_python: Path | None = None
    vllm_plain_python: Path | None = None
    """An environment without zentorch, if the other one has it."""
    node_modules: Path | None = None


def all_arms(folder: Path, rivals: Rivals, num_requests: int, num_registered: int = NUM_REGISTERED) -> list[Arm]:
    """folder: for the requests files."""
    llama = Work(folder, "llama-100m", num_requests, name="llama", keeps_servers=True)
    qwen = Work(folder, "qwen3-0.6b", num_requests // 2, name="qwen")
    prefixes = Work(folder, "llama-100m", num_requests // 2, 4, prompt_mean=64, prefix_tokens=2048, name="prefixes")
    return [
        *_llama(llama, rivals, num_registered),
        *_qwen(qwen, rivals),
        *_prefixes(prefixes, rivals),
    ]


def _llama(work: Work, rivals: Rivals, num_registered: int) -> list[Arm]:
    return [
        library("PEFT, 16 adapters", "arm_static.py", work, "distinct"),
        library("in process, 16 adapters", "arm_engine.py", work, "distinct"),
        *_vllm("vLLM, 16 adapters", rivals.vllm_python, work, "distinct"),
        *_vllm("vLLM without zentorch, 16 adapters", rivals.vllm_plain_python, work, "distinct"),
        over_http("HTTP, 16 adapters", lambda: loraserve(work), work, "distinct"),
        over_http(f"HTTP, 16 adapters of {num_registered:,}", lambda: _of_many(work, num_registered), work, "distinct"),
        over_http("HTTP, Zipf mix", lambda: loraserve(work), work, "zipf"),
        library("in process, Zipf mix", "arm_engine.py", work, "zipf"),
        over_http("HTTP, base on the LoRA engine", lambda: loraserve(work), work, "base"),
        over_http("HTTP, base", lambda: loraserve(work, lora=False), work, "base"),
        *_vllm("vLLM, base", rivals.vllm_python, work, "base"),
        *_vllm("vLLM without zentorch, base", rivals.vllm_plain_python, work, "base"),
        library("in process, base on the LoRA engine", "arm_engine.py", work, "base", adapters_of="distinct"),
        library("in process, base", "arm_engine.py", work, "base"),
        library("transformers generate, base", "arm_static.py", work, "base"),
        library("transformers continuous, base", "arm_continuous.py", work, "base"),
        *_llama_cpp("llama.cpp, 16 adapters", rivals, work, "distinct"),
        *_llama_cpp("llama.cpp, base", rivals, work, "base"),
        _decode_step("base", work, "base"),
        _decode_step("16 adapters", work, "distinct"),
        _ttft(work),
        _step_overhead(work),
        _start(),
    ]


def _qwen(work: Work, rivals: Rivals) -> list[Arm]:
    return [
        library(f"{QWEN}: PEFT, 16 adapters", "arm_static.py", work, "distinct"),
        *_vllm(f"{QWEN}: vLLM, 16 adapters", rivals.vllm_python, work, "distinct"),
        over_http(f"{QWEN}: HTTP, 16 adapters", lambda: loraserve(work), work, "distinct"),
        over_http(f"{QWEN}: HTTP, base", lambda: loraserve(work, lora=False), work, "base"),
        *_vllm(f"{QWEN}: vLLM, base", rivals.vllm_python, work, "base"),
        library(f"{QWEN}: transformers generate, base", "arm_static.py", work, "base"),
    ]


def _prefixes(work: Work, rivals: Rivals) -> list[Arm]:
    without = "--no-enable-prefix-caching"
    return [
        library(f"{PREFIXES}: PEFT, 4 adapters", "arm_static.py", work, "distinct"),
        *_vllm(f"{PREFIXES}: vLLM, 4 adapters", rivals.vllm_python, work, "distinct"),
        over_http(f"{PREFIXES}: HTTP, 4 adapters", lambda: loraserve(work), work, "distinct"),
        over_http(f"{PREFIXES}: HTTP, 4 adapters, no cache", lambda: loraserve(work, without), work, "distinct"),
    ]


def _vllm(name: str, python: Path | None, work: Work, mix: str) -> list[Arm]:
    return [over_http(name, lambda: vllm_server(python, work, mix), work, mix)] if python else []


def _llama_cpp(name: str, rivals: Rivals, work: Work, mix: str) -> list[Arm]:
    return [llama_cpp(name, rivals.node_modules, work, mix)] if rivals.node_modules else []


def _of_many(work: Work, num_registered: int) -> Server:
    idle = shapes.make_idle_adapters(work.shape, OUT, num_registered - work.num_adapters)
    return loraserve(work, "--adapter-dir", str(idle))


def _decode_step(label: str, work: Work, mix: str) -> Arm:
    figures = f"decode step ms, {label}", f"byte floor ms, {label}"

    def run(turn: Turn) -> dict[str, float]:
        found = last_line([sys.executable, str(HERE / "arm_decode_step.py"), *model_options(work, mix)])
        return dict(zip(figures, (found["step_ms"], found["read_ms"]), strict=True))

    return Arm(f"decode step, {label}", figures, run)


def _ttft(work: Work) -> Arm:
    """Sends the same prompts twice, one at a time: the second time, all their blocks except the last are cached."""
    long = Work(work.folder, work.shape, 8, prompt_mean=1024, output_mean=1, spread=0, name="long")
    figures = "TTFT ms, 1,024 tokens uncached", "TTFT ms, 1,024 tokens cached"

    def run(turn: Turn) -> dict[str, float]:
        requests = long.requests("base", turn.repeat)
        with running("ttft", loraserve(work, lora=False)) as url:
            found = [load_test(url, requests, concurrency=1)["total"]["ttft_ms"]["p50"] for _ in figures]
        return dict(zip(figures, found, strict=True))

    return Arm("TTFT", figures, run)


def _step_overhead(work: Work) -> Arm:
    parts = [(part, size) for size in (16, 64) for part in ("overhead", "step")]
    figures = tuple(f"{part} ms, {size} sequences" for part, size in parts)

    def run(turn: Turn) -> dict[str, float]:
        lines = output_lines([sys.executable, str(HERE / "bench_step_overhead.py"), "--model", str(work.model)])
        cases = {case["sequences"]: case for case in map(json.loads, lines) if case["prompt_tokens"] == 128}
        return dict(zip(figures, (cases[size][f"{part}_ms"] for part, size in parts), strict=True))

    return Arm("step overhead", figures, run)


def _start() -> Arm:
    """From the command to the first answer; an earlier start has compiled kernels and packed the demo's adapters."""
    figure, data = "start ms, demo", OUT / "demo"
    command = [sys.executable, "-m", "loraserve.cli.main", "serve", "--port", "{port}", "--data-dir", str(data)]

    def run(turn: Turn) -> dict[str, float]:
        if not data.exists():
            _seconds_to_start(command)
        return {figure: _seconds_to_start(command) * 1000}

    return Arm("start", (figure,), run)


def _seconds_to_start(command: list[str]) -> float:
    begin = time.perf_counter()
    with running("start", Server(command)):
        return time.perf_counter() - begin

"""The GPU benchmarks from their first line to the table of goals, as on a GPU but small and interpreted.

Tests that they run, not their measurements: a CPU stands in for the GPU, and a replay repeats a graph's launches.
"""

import importlib
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import gpu_suite
import pytest
import torch
from bench_engine_gpu import measure
from gpu import kernel_bench, timing
from gpu.attention import Workload
from gpu.kernel_bench import Case
from gpu.record import Arm, Figure, keep
from gpu.results import Results
from gpu.work import ATTENTION, RANK_16, AdapterKind, Prefill, Work
from gpu_goals import NOT_MEASURED, goals
from gpu_suite import Outcome
from transformers import LlamaConfig

from tests.support.cuda_on_the_cpu import GPU_NAME, cuda_on_the_cpu
from tests.support.host_accelerator import HostAccelerator
from tests.support.interpreted_float8 import convert_as_a_gpu

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the benchmarks themselves"),
    # Attention leaves a graph's padded rows undefined; numpy, which interprets, warns about operations on them.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]

CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
WORK = Work(
    batch_sizes=(1, 2),
    num_tokens=4,
    kind=AdapterKind(RANK_16.name, (32,), num_adapters=2),
    other_kinds=(AdapterKind(ATTENTION.name, (16, 32), ("q_proj", "o_proj"), num_adapters=2),),
    dtype="float16",
    max_num_batched_tokens=16,
    kv_cache_memory_bytes=1 << 20,
    prefills=(Prefill(1, 16, 1),),
    prefill_repeats=1,
    cold_prompts=(4,),
    cold_repeats=1,
    loading_prompts=(4,),
    loading_batch_size=1,
    loading_steps=2,
    warm_tokens=1,
    profiled_steps=2,
    probe_bytes=1 << 16,
)


NOT_HERE = {"GPU waits for the host in a step", "decode attention / bandwidth"}


OWN_PATHS = {"prefill", "rows", "float", "write", "rotate", "add", "heads", "greedy", "penalties", "top_k", "top_p"}
"""Words in the names of benchmark cases that take a code path of their own."""


@pytest.fixture(scope="module")
def gpu(unchecked_models: None) -> Iterator[HostAccelerator]:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as monkeypatch, cuda_on_the_cpu(monkeypatch) as accelerator:
        convert_as_a_gpu(monkeypatch)
        monkeypatch.setattr(timing, "event_us", timing.clock_us)
        yield accelerator


def steps(results: Results, arm: Arm) -> set[tuple[int, int, str]]:
    return {
        (each.batch_size, each.num_adapters, each.adapters)
        for each in results.records
        if (each.arm, each.figure) == (arm, Figure.DECODE_STEP)
    }


@pytest.mark.slow
def test_the_engine_benchmark_runs_and_its_results_file_gives_the_goals(gpu: HostAccelerator, tmp_path: Path) -> None:
    keep(measure(CONFIG, WORK, tmp_path / "model", "cuda", time.monotonic() + 600), tmp_path / "engine")
    outcomes = {"engine": Outcome("engine", 0, 1.0, "", json.loads((tmp_path / "engine").read_text()))}
    assert gpu.num_recordings == 6 + 3, "graphs for 1, 2 and 16 rows, with LoRA also for the base model alone"
    assert gpu.num_replays > 0
    path = tmp_path / "results" / "gpu.json"
    gpu_suite.write_outcomes(path, "abc", outcomes)
    content = json.loads(path.read_text())
    assert content["machine"]["gpu"] == GPU_NAME
    assert gpu_suite.read_outcomes(path, "abc") == outcomes

    results = Results(content, WORK.num_tokens)
    with_lora = {(1, 0, "r16"), (1, 1, "r16"), (2, 0, "r16"), (2, 1, "r16"), (2, 2, "r16"), (2, 2, "r16 qkvo")}
    assert steps(results, Arm.NO_LORA) == {(1, 0, "r16"), (2, 0, "r16")}
    assert steps(results, Arm.LORA) == steps(results, Arm.FLOOR) == with_lora
    rows = [goal.row(results) for goal in goals(WORK)]
    without = {row[0] for row in rows if NOT_MEASURED in row}
    assert without == NOT_HERE


def run_once(calls: Sequence[timing.Call]) -> timing.Times:
    for call in calls:
        call()
    return timing.Times(2.0, 1.0, 3.0)


def smallest_of_each_arm(cases: Iterable[Case]) -> list[Case]:
    """Also of each code path of its own, which the name shows; LoRA's linears differ only in size."""
    found: dict[object, Case] = {}
    for case in sorted(cases, key=lambda case: case.size_bytes):
        words = {word.rstrip("0123456789") for word in re.split("[ ,]+", case.name)}
        found.setdefault((case.arm, frozenset(words & OWN_PATHS)), case)
    return list(found.values())


def shorten(workload: Workload) -> Workload:
    """The interpreter takes half a minute for 8,192 keys."""
    contexts, rows = (
        [min(length, 40) for length in lengths[:2]] for lengths in (workload.context_lens, workload.num_rows)
    )
    return replace(workload, context_lens=contexts, num_rows=rows)


def shorten_contexts(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNIFORM", "WITHOUT_PREFIX", "OTHERS"):
        if hasattr(bench, name):
            monkeypatch.setattr(bench, name, [shorten(workload) for workload in getattr(bench, name)])


@pytest.mark.slow
@pytest.mark.parametrize("name", gpu_suite.KERNEL_BUDGETS_S)
def test_every_arm_of_a_kernel_benchmark_runs(
    name: str, gpu: HostAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceilings = timing.Ceilings(3e12, 4e12, 8e14, 2.0)
    monkeypatch.setattr(kernel_bench, "measure_ceilings", lambda: ceilings)
    monkeypatch.setattr(kernel_bench, "replay_us", run_once)
    monkeypatch.setattr(kernel_bench, "pool_size", lambda _: 1)
    monkeypatch.setattr(sys, "argv", [name, "--json", str(tmp_path / "results.json"), "--budget-s", "600"])
    bench = importlib.import_module(f"bench_{name}")
    shorten_contexts(bench, monkeypatch)
    cases = smallest_of_each_arm(bench.cases())
    kernel_bench.run_bench(name, lambda: cases)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["ceilings"] == asdict(ceilings)
    assert content["not_run"] == []
    assert [(each["name"], each["arm"]) for each in content["results"]] == [(case.name, case.arm) for case in cases]

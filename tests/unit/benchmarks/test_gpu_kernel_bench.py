"""The harness of the GPU kernel benchmarks, with made-up times instead of measured ones."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import bench_kv_write
import pytest
import torch
from gpu import kernel_bench
from gpu.kernel_bench import Case, Measured, measure, print_line, run_bench
from gpu.timing import Call, Ceilings, Times

CEILINGS = Ceilings(copy_bytes_per_s=2e12, read_bytes_per_s=4e12, flops_per_s=8e14, launch_us=2.5)
TIMES = Times(median_us=50.0, p10_us=48.0, p90_us=55.0)
CASES = [
    Case("T16 N64", "triton", lambda seed: lambda: seed, 40_000_000),
    Case("T16 N64", "torch", lambda seed: lambda: seed, 40_000_000, 16e9),
    Case("T1 N64", "triton", lambda seed: lambda: seed, 400),
]


class Clock:
    """Replays take 10 s each, and nothing else takes any time."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def replay(self, calls: Sequence[Call]) -> Times:
        self.now += 10
        return TIMES


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(kernel_bench, "time", clock)
    monkeypatch.setattr(kernel_bench, "replay_us", clock.replay)
    monkeypatch.setattr(kernel_bench, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(kernel_bench, "require_cuda", lambda: None)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_name=lambda: "A GPU of the tests"))
    return clock


def run(monkeypatch: pytest.MonkeyPatch, path: Path, budget_s: int, *options: str) -> dict[str, list[object]]:
    arguments = ["bench", "--json", str(path), "--budget-s", str(budget_s), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    run_bench("bench", lambda: iter(CASES))
    return json.loads(path.read_text())


def test_a_line_has_time_floor_excess_bandwidth_and_share_of_copy_bandwidth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # 40 MB in 50 µs is 800 GB/s; a copy reaches 2000.
    print_line(Measured("bench", "T16 N64", "triton", 50.0, 48.0, 55.0, 10.0, 40_000_000, 0.0), CEILINGS)
    name, columns = (line := capsys.readouterr().out)[:44], line[44:].split()
    assert name.strip() == "T16 N64"
    assert columns == ["triton", "50.00", "10.00", "40.00", "800", "0.40"]


def test_columns_are_aligned_with_their_names(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, tmp_path / "results.json", 60, "--only", "torch")
    machine, header, line = capsys.readouterr().out.splitlines()
    assert machine == "A GPU of the tests: copy 2.00 TB/s, read 4.00 TB/s, bf16 800 TFLOP/s, launch 2.50 us"
    columns = {name: line[: header.index(name) + len(name)].split()[-1] for name in ("floor us", "over us", "GB/s")}
    assert columns == {"floor us": "20.00", "over us": "30.00", "GB/s": "800"}
    assert header.split()[-2:] == ["of", "copy"]
    assert line.split()[-1] == "0.40"


def test_a_case_is_timed_over_its_own_argument_sets_and_keeps_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[object] = []

    def replay(calls: Sequence[Call]) -> Times:
        seeds.extend(call() for call in calls)
        return TIMES

    monkeypatch.setattr(kernel_bench, "replay_us", replay)
    assert measure("bench", CASES[1], CEILINGS) == Measured(
        bench="bench",
        name="T16 N64",
        arm="torch",
        median_us=50.0,
        p10_us=48.0,
        p90_us=55.0,
        floor_us=20.0,
        size_bytes=40_000_000,
        flops=16e9,
    )
    assert seeds == list(range(7)), "256 MiB of 40 MB each"


@pytest.mark.parametrize(("capability", "suffixes"), [((8, 0), {""}), ((8, 9), {"", ", float8"})])
def test_a_cache_write_counts_bytes_read_and_bytes_written(
    capability: tuple[int, int], suffixes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    sizes = {(case.name, case.arm): case.size_bytes for case in bench_kv_write.cases()}
    # K and V of 8 heads of 128: reads 4,096 bytes and a slot number of 8, writes as many bytes or half as many.
    row_bytes = {"": 8200, ", float8": 6152}
    assert sizes == {
        (f"T{num_rows}{suffix}", arm): num_rows * row_bytes[suffix]
        for suffix in suffixes
        for num_rows in bench_kv_write.NUM_ROWS
        for arm in ("triton", "torch")
    }


@pytest.mark.parametrize(("budget_s", "num_run"), [(-1, 0), (5, 1), (15, 2), (25, 3)])
def test_cases_beyond_the_budget_are_listed_in_the_file_and_printed(
    budget_s: int,
    num_run: int,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = run(monkeypatch, tmp_path / "results.json", budget_s)
    names = ["T16 N64, triton", "T16 N64, torch", "T1 N64, triton"]
    assert content["not_run"] == names[num_run:]
    assert len(content["results"]) == num_run
    assert capsys.readouterr().out.count("not measured") == 3 - num_run


def test_the_results_of_a_killed_benchmark_list_the_cases_not_run(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail_at_the_second(calls: Sequence[Call]) -> Times:
        if clock.now > 100:
            raise RuntimeError("killed")
        return clock.replay(calls)

    monkeypatch.setattr(kernel_bench, "replay_us", fail_at_the_second)
    with pytest.raises(RuntimeError, match="killed"):
        run(monkeypatch, tmp_path / "results.json", 60)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["not_run"] == ["T16 N64, torch", "T1 N64, triton"]

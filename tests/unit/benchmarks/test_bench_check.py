from pathlib import Path

import bench_check
import pytest
from goals import GOALS, Goal
from results_file import Machine, Run, write_runs

BASE, PEFT = (next(goal for goal in GOALS if goal.key == key) for key in ("vllm-base", "peft"))


def write(path: Path, goal: Goal, ours: list[float]) -> Path:
    figures = dict(zip(goal.pair, (ours, [1.0] * len(ours)), strict=True))
    machine = Machine("cpu", 2, "AVX2", "3.11", "abc")
    write_runs(path, [Run("2026-01-01.1", "2026-01-01", 64, len(ours), machine, {}, figures)])
    return path


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write(tmp_path / "cpu-avx2.json", BASE, [2.4, 2.5])
    monkeypatch.setattr(bench_check, "result_path", lambda _: path)
    return path


def outcome(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> object:
    monkeypatch.setattr("sys.argv", ["bench_check.py", "--fresh", str(fresh)])
    with pytest.raises(SystemExit) as end:
        bench_check.main()
    return end.value.code


@pytest.mark.parametrize(("ours", "code"), [([2.4, 2.5], 0), ([1.9, 2.0], 1)], ids=["as before", "less"])
def test_a_lower_ratio_is_reported_as_a_loss(
    committed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ours: list[float],
    code: int,
) -> None:
    assert outcome(monkeypatch, write(tmp_path / "fresh.json", BASE, ours)) == code
    assert capsys.readouterr().out.count("LOSS") == code


def test_a_run_without_comparable_ratios_fails(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = write(tmp_path / "fresh.json", PEFT, [9.0])
    assert outcome(monkeypatch, fresh) == "this run has no ratio in common with cpu-avx2.json"
    assert outcome(monkeypatch, tmp_path / "none.json") == "this run has no ratio in common with cpu-avx2.json"


@pytest.mark.parametrize("options", [["--vllm-python", "bin/python"], ["--vllm-python=bin/python"]])
def test_only_rivals_given_on_the_command_line_count_as_installed(options: list[str]) -> None:
    assert bench_check._is_installed("vllm-base", options)
    assert not bench_check._is_installed("vllm-plain-base", options)
    assert bench_check._is_installed("peft", [])

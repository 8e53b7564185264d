"""The bookkeeping of the GPU suite, which needs no GPU."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_suite
import pytest
from gpu_suite import GRACE_S, TOTAL_S, Outcome, Part, read_outcomes, run_part, write_outcomes

SUITE = Path(gpu_suite.__file__)


def part(tmp_path: Path, code: str, budget_s: int = 60) -> Part:
    script = tmp_path / "bench_part.py"
    script.write_text(code)
    return Part("part", "kernels", str(script), budget_s)


def test_a_benchmark_gets_its_budget_and_its_results_are_kept(tmp_path):
    code = (
        "import json, sys\n"
        "json.dump({'results': sys.argv[3:]}, open(sys.argv[2], 'w'))\n"
        "print('first'); print('last')\n"
    )
    outcome = run_part(part(tmp_path, code), 7)
    assert (outcome.exit_code, outcome.summary) == (0, "last")
    assert outcome.content == {"results": ["--budget-s", "7"]}


def test_results_written_before_a_benchmark_timed_out_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "GRACE_S", 2)
    code = "import sys, time\nopen(sys.argv[2], 'w').write('{\"results\": [1]}')\ntime.sleep(600)\n"
    outcome = run_part(part(tmp_path, code), 1)
    assert outcome.exit_code == -1
    assert outcome.content == {"results": [1]}


def test_an_interrupted_benchmark_is_killed_and_its_results_so_far_are_kept(tmp_path, monkeypatch):
    started = []

    class InterruptedWait(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is None:  # it was killed
                return super().wait()
            started.append(self)
            results = Path(self.args[self.args.index("--json") + 1])
            while not results.exists():
                time.sleep(0.01)
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu_suite.subprocess, "Popen", InterruptedWait)
    code = (
        "import os, sys, time\n"
        "open(sys.argv[2] + '.new', 'w').write('{\"results\": [1]}')\n"
        "os.replace(sys.argv[2] + '.new', sys.argv[2])\n"
        "time.sleep(600)\n"
    )
    outcome = run_part(part(tmp_path, code), 60)
    assert (outcome.exit_code, outcome.content) == (gpu_suite.INTERRUPTED, {"results": [1]})
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_failing_benchmark_is_reported_with_its_exit_code(tmp_path):
    outcome = run_part(part(tmp_path, "import sys; sys.exit('out of memory')"), 5)
    assert (outcome.exit_code, outcome.summary, outcome.content) == (1, "out of memory", {})


def test_parts_of_another_run_on_the_same_commit_stay_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "machine", lambda: {"gpu": "none"})
    path = tmp_path / "results" / "gpu.json"
    outcomes = {"tests": Outcome("tests", 0, 1.5, "3 passed"), "engine": Outcome("engine", 1, 2.0, "", {"a": [1]})}
    write_outcomes(path, "abc", outcomes)
    assert read_outcomes(path, "abc") == outcomes
    assert read_outcomes(path, "abc+") == {}
    assert read_outcomes(path, "") == {}
    assert read_outcomes(tmp_path / "missing.json", "abc") == {}


def test_the_table_of_goals_is_written_next_to_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "machine", lambda: {"gpu": "a GPU"})
    path = tmp_path / "gpu.json"
    record = {
        "batch_size": 1,
        "num_adapters": 0,
        "prompt_tokens": 128,
        "output_tokens": 128,
        "figure": "decode step ms",
    }
    results = [record | {"arm": "floor", "value": 3.0}, record | {"arm": "no lora", "value": 4.0}]
    write_outcomes(path, "abc", {"engine": Outcome("engine", 0, 1.0, "", {"results": results})})
    table = path.with_suffix(".md").read_text()
    assert table.startswith("a GPU, ")
    assert "| byte floor / step, base-only decode | B 1 | ≥ 0.8 | ≥ 0.9 | **0.75** | no |" in table


def test_every_part_has_a_script_and_a_known_kind():
    parts = gpu_suite.parts()
    assert {each.kind for each in parts} == set(gpu_suite.KINDS)
    assert [each.script for each in parts if not SUITE.with_name(each.script).exists()] == []


def test_parts_that_goals_need_fit_into_the_total_time_at_their_maximum():
    seconds = 0
    for each in gpu_suite.parts():
        seconds += each.budget_s + gpu_suite.GRACE_S
        if each.name == "paged_decode":
            break
    assert seconds <= gpu_suite.TOTAL_S < 9 * 60


def test_kernels_that_goals_need_are_measured_first():
    names = [part.name for part in gpu_suite.parts() if part.kind == "kernels"]
    assert names[:4] == ["paged_decode", "lora_shrink", "lora_expand", "lora_linear"]


class Suite:
    """Runs `main` of the suite; each part takes `share` of its time limit and ends as `outcomes` says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.share = 1.0
        """Share of its time limit that each part takes."""
        self.outcomes: dict[str, tuple[int, dict[str, Any]]] = {}
        """(exit code, content) by part; parts not listed exit with 0 and no content."""
        self.ran: list[str] = []

    def monotonic(self) -> float:
        return self.now

    def run_part(self, part: Part, budget_s: int) -> Outcome:
        self.ran.append(part.name)
        self.now += self.share * (budget_s + GRACE_S)
        exit_code, content = self.outcomes.get(part.name, (0, {}))
        return Outcome(part.name, exit_code, 1.0, "done", content)

    def exit_code(self, *arguments: str) -> int:
        self.now, self.ran = 0.0, []
        sys.argv = ["gpu_suite.py", "--out", str(self.path), "--commit", "abc", *arguments]
        with pytest.raises(SystemExit) as exit_info:
            gpu_suite.main()
        return int(exit_info.value.code or 0)

    def content(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    def table(self) -> str:
        return self.path.with_suffix(".md").read_text()


@pytest.fixture
def suite(tmp_path, monkeypatch):
    suite = Suite(tmp_path / "gpu.json")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(gpu_suite, "time", suite)
    monkeypatch.setattr(gpu_suite, "run_part", suite.run_part)
    monkeypatch.setattr(gpu_suite, "machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(gpu_suite, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    return suite


NAMES = [part.name for part in gpu_suite.parts()]


def test_a_complete_run_lists_nothing_as_not_run_and_exits_with_0(suite, capsys):
    suite.share = 0.3
    assert suite.exit_code() == 0
    assert suite.ran == NAMES
    assert suite.content()["not_run"] == []
    assert "Not run" not in suite.table()
    assert "cut short" not in suite.table()
    assert "incomplete" not in capsys.readouterr().out


def test_parts_beyond_the_total_time_are_listed_everywhere_and_the_run_is_incomplete(suite, capsys):
    assert suite.exit_code() == gpu_suite.INCOMPLETE == 3
    assert suite.now <= TOTAL_S
    assert "paged_decode" in suite.ran
    left_out = NAMES[len(suite.ran) :]
    assert "sampling" in left_out
    assert suite.content()["not_run"] == left_out
    assert f"Not run: {', '.join(f'`{name}`' for name in left_out)}.\n" in suite.table()
    output = capsys.readouterr().out
    assert output.endswith(f"incomplete, no time was left for: {', '.join(left_out)}\n")
    assert [f"== {name}: left out" in output for name in NAMES] == [name in left_out for name in NAMES]


def test_a_later_run_of_the_left_out_parts_completes_the_file(suite):
    suite.exit_code()
    left_out = suite.content()["not_run"]
    suite.share = 0.1
    assert suite.exit_code("--only", "kernels") == 0
    assert {*left_out} < {*suite.ran}
    assert suite.content()["not_run"] == []
    assert "Not run" not in suite.table()


def test_unselected_parts_are_listed_but_do_not_make_a_run_incomplete(suite):
    assert suite.exit_code("--only", "engine") == 0
    assert suite.content()["not_run"] == [name for name in NAMES if name != "engine"]


def test_nothing_is_written_without_time_for_any_part(suite, capsys):
    assert suite.exit_code("--total-s", "10") == 3
    assert not suite.path.exists()
    assert "written to" not in capsys.readouterr().out


def test_cases_that_a_part_left_out_are_listed_and_make_the_run_incomplete(suite):
    suite.share = 0.1
    suite.outcomes["lora_shrink"] = 0, {"results": [], "not_run": ["T1 N64, triton", "T1 N64, torch"]}
    assert suite.exit_code() == 3
    assert "`lora_shrink` was cut short, without: `T1 N64, triton`, `T1 N64, torch`.\n" in suite.table()


def test_no_part_starts_after_an_interrupted_one(suite, capsys):
    suite.outcomes["engine"] = gpu_suite.INTERRUPTED, {"results": []}
    assert suite.exit_code() == gpu_suite.FAILED
    assert suite.ran == ["tests", "engine"]
    assert suite.content()["not_run"] == NAMES[2:]
    assert "`engine` was cut short.\n" in suite.table()
    assert "engine           interrupted" in capsys.readouterr().out


@pytest.mark.parametrize("code", [-1, 1, 5])
def test_a_failed_or_killed_part_determines_the_exit_code_of_an_incomplete_run(suite, code):
    suite.outcomes["engine"] = code, {}
    assert suite.exit_code() == gpu_suite.FAILED == 1
    assert suite.content()["not_run"]
    assert ("`engine` was cut short.\n" in suite.table()) == (code == -1)

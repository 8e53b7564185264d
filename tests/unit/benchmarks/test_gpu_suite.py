"""What of the GPU suite can be shown without a GPU: its bookkeeping, and that it says so and ends."""

import subprocess
import sys
from pathlib import Path

import gpu_suite
import pytest
import torch
from gpu_suite import Outcome, Part, read_outcomes, run_part, write_outcomes

SUITE = Path(gpu_suite.__file__)

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")


def part(tmp_path: Path, code: str, budget_s: int = 60) -> Part:
    script = tmp_path / "bench_part.py"
    script.write_text(code)
    return Part("part", "kernels", (sys.executable, str(script)), budget_s)


@needs_no_gpu
@pytest.mark.parametrize("script", ["gpu_suite.py", "bench_sampling.py", "bench_lora_shrink.py", "bench_engine_gpu.py"])
def test_without_a_gpu_every_benchmark_says_so_in_one_line_and_fails(script):
    command = [sys.executable, str(SUITE.with_name(script))]
    run = subprocess.run(command, capture_output=True, text=True, cwd=SUITE.parents[1])
    assert run.returncode == 1
    assert run.stdout == ""
    assert "CUDA device" in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_benchmark_is_told_its_time_and_its_results_are_kept(tmp_path):
    code = (
        "import json, sys\n"
        "json.dump({'results': sys.argv[3:]}, open(sys.argv[2], 'w'))\n"
        "print('first'); print('last')\n"
    )
    outcome = run_part(part(tmp_path, code), 7)
    assert (outcome.exit_code, outcome.summary) == (0, "last")
    assert outcome.content == {"results": ["--budget-s", "7"]}


def test_what_a_benchmark_wrote_before_its_time_was_over_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "GRACE_S", 2)
    code = "import sys, time\nopen(sys.argv[2], 'w').write('{\"results\": [1]}')\ntime.sleep(600)\n"
    outcome = run_part(part(tmp_path, code), 1)
    assert outcome.exit_code == -1
    assert outcome.content == {"results": [1]}


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


def test_every_part_has_its_script_and_all_kinds_can_be_named():
    parts = gpu_suite.parts()
    assert {each.kind for each in parts} == {"tests", "kernels", "engine"}
    scripts = [each.command[1] for each in parts if each.kind != "tests"]
    assert [script for script in scripts if not (SUITE.parents[1] / script).exists()] == []

"""What of the GPU suite can be shown without a GPU: its bookkeeping."""

from pathlib import Path

import gpu_suite
from gpu_suite import Outcome, Part, read_outcomes, run_part, write_outcomes

SUITE = Path(gpu_suite.__file__)


def part(tmp_path: Path, code: str, budget_s: int = 60) -> Part:
    script = tmp_path / "bench_part.py"
    script.write_text(code)
    return Part("part", "kernels", str(script), budget_s)


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


def test_the_table_of_the_goals_is_written_beside_the_results(tmp_path, monkeypatch):
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


def test_every_part_has_its_script_and_all_kinds_can_be_named():
    parts = gpu_suite.parts()
    assert {each.kind for each in parts} == set(gpu_suite.KINDS)
    assert [each.script for each in parts if not SUITE.with_name(each.script).exists()] == []


def test_the_most_that_parts_may_take_leaves_time_for_all_that_a_goal_is_about():
    seconds = 0
    for each in gpu_suite.parts():
        seconds += each.budget_s + gpu_suite.GRACE_S
        if each.name == "paged_decode":
            break
    assert seconds <= gpu_suite.TOTAL_S < 9 * 60

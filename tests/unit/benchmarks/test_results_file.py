from pathlib import Path

from results_file import Machine, Run, merged, new_id, newest, read_runs, write_runs

MACHINE = Machine("cpu", 2, "AVX2", "3.11", "abc")


def run(run_id: str, *figures: str) -> Run:
    return Run(run_id, "2026-01-01", 64, 1, MACHINE, {"torch": "2"}, {name: [1.0] for name in figures})


def ids(runs: list[Run]) -> list[str]:
    return [run.id for run in runs]


def test_runs_are_read_as_written(tmp_path: Path) -> None:
    runs = [run("1", "a", "b"), run("2", "a")]
    write_runs(tmp_path / "new" / "cpu.json", runs)
    assert read_runs(tmp_path / "new" / "cpu.json") == runs
    assert read_runs(tmp_path / "none.json") == []


def test_a_run_with_all_figures_replaces_all_older_runs() -> None:
    assert ids(merged([run("1", "a"), run("2", "b")], run("3", "a", "b"), [("a", "b")])) == ["3"]


def test_a_run_of_one_figure_keeps_runs_with_other_figures() -> None:
    assert ids(merged([run("1", "a", "b")], run("2", "a"), [])) == ["1", "2"]


def test_an_older_run_is_kept_for_a_pair_that_no_newer_run_has() -> None:
    apart = [run("1", "a", "b"), run("2", "a", "c")]
    assert ids(merged(apart, run("3", "b"), [("a", "b")])) == ["1", "2", "3"]
    assert ids(merged(apart, run("3", "b"), [])) == ["2", "3"]


def test_a_run_written_after_every_repeat_replaces_itself() -> None:
    assert ids(merged([run("1", "a"), run("2", "b")], run("1", "a"), [])) == ["2", "1"]


def test_the_newest_run_with_all_figures_is_found() -> None:
    runs = [run("1", "a", "b"), run("2", "a")]
    found, absent = newest(runs, ["a", "b"]), newest(runs, ["c"])
    assert found is not None
    assert (found.id, absent) == ("1", None)


def test_ids_are_numbered_per_day_and_never_used_again() -> None:
    assert new_id("2026-01-01", []) == "2026-01-01.1"
    assert new_id("2026-01-01", [run("2026-01-01.3"), run("2026-01-01.12")]) == "2026-01-01.13"
    assert new_id("2026-01-02", [run("2026-01-01.3")]) == "2026-01-02.1"

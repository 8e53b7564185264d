from pathlib import Path
from shutil import copytree
from xml.etree import ElementTree

import bench_report
import pytest
from bench_report import comparisons_table, figures_table, fill, goals_table, newest_figures, runs_table
from goals import GATED, ratios
from report_plots import rivals_plot, throughput_plot
from results_file import RESULTS, Machine, Run


def run(run_id: str, **figures: list[float]) -> Run:
    names = {"http": "HTTP, 16 adapters", "peft": "PEFT, 16 adapters", "base": "HTTP, base"}
    named = {names.get(name, name): values for name, values in figures.items()}
    return Run(run_id, "2026-01-01", 64, 2, Machine("cpu", 2, "AVX2", "3.11", "abc"), {"torch": "2"}, named)


RUNS = [run("1", http=[500.0, 510.0], peft=[100.0, 102.0]), run("2", http=[600.0, 620.0], base=[700.0, 720.0])]


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_each_row_names_its_run() -> None:
    peft, own = cells(goals_table(ratios(RUNS), RUNS))
    assert (peft[1], peft[2], peft[-3:]) == ("PEFT, static batches", "**5.0**", ["yes", "", "1"])
    assert (own[1], own[2], own[-1]) == ("own base", "**0.86**", "2")
    assert {row[0]: row[-1] for row in cells(figures_table(RUNS))} == {
        "HTTP, 16 adapters": "2",
        "HTTP, base": "2",
        "PEFT, 16 adapters": "1",
    }
    assert [row[0] for row in cells(runs_table(RUNS))] == ["2", "1"]


def test_the_in_process_ratio_names_its_run_if_it_is_another() -> None:
    engine = run("3", peft=[100.0, 100.0], **{"in process, 16 adapters": [700.0, 700.0]})
    both = run("4", http=[600.0], peft=[100.0], **{"in process, 16 adapters": [800.0]})
    for runs, expected in ((RUNS[:1], ""), ([*RUNS, engine], "7.0 (3)"), ([*RUNS, both], "8.0")):
        (row,) = [row for row in cells(goals_table(ratios(runs), runs)) if row[1] == "PEFT, static batches"]
        assert row[-2] == expected


def test_an_empty_table_says_none_measured() -> None:
    assert comparisons_table([]) == "None measured."


def test_only_text_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- goals:start -->\nold\n<!-- goals:end -->\nb\n")
    fill(page, "goals", "new")
    fill(page, "figures", "nowhere")
    assert page.read_text() == "a\n<!-- goals:start -->\nnew\n<!-- goals:end -->\nb\n"


def test_documents_and_plots_match_the_committed_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = bench_report.ROOT
    copytree(root / "docs", tmp_path / "docs")
    (tmp_path / "README.md").write_bytes((root / "README.md").read_bytes())
    for name in ("DOCUMENT", "README", "IMAGES"):
        monkeypatch.setattr(bench_report, name, tmp_path / getattr(bench_report, name).relative_to(root))
    bench_report.main()
    kinds = [path.stem.removeprefix("cpu-") for path in RESULTS.glob("cpu-*.json")]
    plots = [f"docs/images/{plot}-{kind}.svg" for kind in kinds for plot in ("rivals", "throughput")]
    for path in ("README.md", "docs/performance.md", *plots):
        assert (tmp_path / path).read_bytes() == (root / path).read_bytes(), "`make bench` writes it"
    for name in ("goals", "comparisons", "figures", "runs"):
        page = (root / "docs" / "performance.md").read_text()
        assert all(f"<!-- {name}-{kind}:start -->" in page for kind in kinds), name


def test_plots_show_every_throughput_and_every_rival() -> None:
    found = [
        "".join(element.itertext()) for element in ElementTree.fromstring(throughput_plot(newest_figures(RUNS))).iter()
    ]
    assert {"HTTP, 16 adapters", "PEFT, 16 adapters", "HTTP, base", "610"} <= set(found)
    rivals = rivals_plot([ratio for ratio in ratios(RUNS) if ratio.goal in GATED])
    assert "5.0 × (goal 4 ×)" in rivals
    assert "own base" not in rivals

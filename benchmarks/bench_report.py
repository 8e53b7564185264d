"""Writes the plots for each kind of CPU, and its tables into the documents, between their markers.

`make bench` runs it after measuring.
"""

import statistics
from pathlib import Path

from goals import GATED, Ratio, in_process, ratios
from report_plots import rivals_plot, throughput_plot
from results_file import RESULTS, Figures, Run, newest, read_runs

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "images"


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for path in sorted(RESULTS.glob("cpu-*.json")):
        report(path.stem.removeprefix("cpu-"), read_runs(path))


def report(kind: str, runs: list[Run]) -> None:
    found = ratios(runs)
    gated = [ratio for ratio in found if ratio.goal in GATED]
    (IMAGES / f"throughput-{kind}.svg").write_text(throughput_plot(newest_figures(runs)))
    (IMAGES / f"rivals-{kind}.svg").write_text(rivals_plot(found))
    fill(DOCUMENT, f"runs-{kind}", runs_table(runs))
    fill(DOCUMENT, f"goals-{kind}", goals_table(gated, runs))
    fill(DOCUMENT, f"comparisons-{kind}", comparisons_table([ratio for ratio in found if ratio not in gated]))
    fill(DOCUMENT, f"figures-{kind}", figures_table(runs))
    fill(README, f"goals-{kind}", goals_table(gated))


def fill(path: Path, name: str, text: str) -> None:
    """Replaces the text between `<!-- name:start -->` and `<!-- name:end -->`, if the file has them."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found, rest = path.read_text().partition(start)
    if found:
        path.write_text(f"{before}{start}\n{text}\n{end}{rest.partition(end)[2]}")


def figure_names(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in reversed(runs) for name in run.figures))


def newest_figures(runs: list[Run]) -> Figures:
    return {name: run.figures[name] for name in figure_names(runs) if (run := newest(runs, [name]))}


def goals_table(found: list[Ratio], runs: list[Run] | None = None) -> str:
    """With `runs`, two more columns: the same ratio for our engine in process, and the id of the run."""
    header, rows = ["work", "against", "ratio", "repeats", "gate", "stretch", "byte floor", "met"], []
    for ratio in found:
        goal = ratio.goal
        sign = "≤" if goal.smaller_is_better else "≥"
        limits = ["" if limit is None else f"{sign} {limit:g}" for limit in (goal.gate, goal.stretch)]
        floor = "" if goal.floor is None else f"{goal.floor:g}"
        rows.append([*_ratio_cells(ratio), *limits, floor, ratio.verdict])
        if runs is not None:
            rows[-1] += [_in_process_cell(ratio, in_process(runs, goal)), ratio.run.id]
    return _table([*header, *(["in process", "run"] if runs is not None else [])], rows)


def _in_process_cell(ratio: Ratio, engine: Ratio | None) -> str:
    if engine is None:
        return ""
    return _number(engine.median) + ("" if engine.run == ratio.run else f" ({engine.run.id})")


def comparisons_table(found: list[Ratio]) -> str:
    rows = [[*_ratio_cells(ratio), ratio.run.id] for ratio in found]
    return _table(["work", "against", "ratio", "repeats", "run"], rows) if rows else "None measured."


def _ratio_cells(ratio: Ratio) -> list[str]:
    least, most = (_number(value, like=ratio.median) for value in (min(ratio.repeats), max(ratio.repeats)))
    return [ratio.goal.work, ratio.goal.against, f"**{_number(ratio.median)}**", f"{least} … {most}"]


def _number(value: float, like: float | None = None) -> str:
    """With as many decimals as `like` has."""
    size = value if like is None else like
    digits = 1 if size >= 2 else 2 if size >= 0.1 else 3
    return f"{value:.{digits}f}"


def figures_table(runs: list[Run]) -> str:
    rows = []
    for name in figure_names(runs):
        run = newest(runs, [name])
        assert run is not None
        values = run.figures[name]
        unit, digits = ("", 2) if " ms, " in name else (" tok/s", 0)
        spread = f"{min(values):.{digits}f} … {max(values):.{digits}f}"
        rows.append([name, f"{statistics.median(values):.{digits}f}{unit}", spread, run.id])
    return _table(["arm", "median", "least … most", "run"], rows)


def runs_table(runs: list[Run]) -> str:
    """One row per run, newest first."""
    rows = []
    for run in reversed(runs):
        machine = run.machine
        cores = f"{machine.cpu}, {machine.cores} cores ({machine.capability})"
        libraries = ", ".join(f"{name} {number}" for name, number in {"Python": machine.python, **run.versions}.items())
        rows.append([run.id, run.date, f"{run.repeats} × {run.num_requests}", cores, f"`{machine.commit}`", libraries])
    return _table(["run", "date", "repeats × requests", "machine", "commit", "with"], rows)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()

"""Flags ratios that fell since the committed result by more than chance explains. `make bench-check` runs it.

Chance is estimated from the spread of the repeats in both results, so more repeats (`--repeats`) find smaller losses.

Compares ratios within a run, never times: this may be another machine with the same kind of CPU. Measures the gated
goals of the committed result whose rivals are installed here. Exits with 1 if any ratio fell.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from goals import GATED, Change, changes, ratios
from machine import describe_machine
from results_file import RESULTS, read_runs, result_path
from work import OUT

NEEDS = {"vllm-plain": "--vllm-plain-python", "vllm": "--vllm-python", "llama": "--llama-cpp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", type=Path, help="Compare this earlier result; else measure now, passing options on.")
    args, options = parser.parse_known_args()
    path = result_path(describe_machine().capability)
    committed = read_runs(path)
    if not committed:
        sys.exit(f"no committed result for this kind of CPU: {path.name} is not one of {_names(RESULTS)}")
    fresh = read_runs(args.fresh or _measured(options, [ratio.goal.key for ratio in ratios(committed)]))
    found = changes(committed, fresh)
    if not found:
        sys.exit(f"this run has no ratio in common with {path.name}")
    print(f"{'':62}{'committed':>10}{'now':>8}{'loss':>8}{'noise':>8}")
    for change in found:
        print(_line(change))
    compared = {change.fresh.goal for change in found}
    for ratio in ratios(committed):
        if ratio.goal not in compared and ratio.goal in GATED:
            print(f"not measured: {ratio.goal.work} / {ratio.goal.against}")
    sys.exit(any(change.is_loss for change in found))


def _names(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.glob("cpu-*.json")))


def _measured(options: list[str], committed: list[str]) -> Path:
    """Measures three repeats of the committed goals, unless the options say otherwise."""
    path = OUT / "check.json"
    path.unlink(missing_ok=True)
    keys = [goal.key for goal in GATED if goal.key in committed and _is_installed(goal.key, options)]
    command = [sys.executable, str(Path(__file__).with_name("bench_rivals.py")), "--repeats", "3", "--json", str(path)]
    only = [] if _is_given("--only", options) else ["--only", *keys]
    subprocess.run([*command, *only, *options], check=True)
    return path


def _is_installed(key: str, options: list[str]) -> bool:
    needs = [option for name, option in NEEDS.items() if key.startswith(name)]
    return not needs or _is_given(needs[0], options)


def _is_given(name: str, options: list[str]) -> bool:
    """Whether the option is given, as two words or as one with `=`."""
    return any(option.split("=")[0] == name for option in options)


def _line(change: Change) -> str:
    goal = change.fresh.goal
    figures = f"{change.committed.median:10.3f}{change.fresh.median:8.3f}{change.loss:8.1%}{change.noise:8.1%}"
    return f"{f'{goal.work} / {goal.against}':62}{figures}{'  LOSS' if change.is_loss else ''}"


if __name__ == "__main__":
    main()

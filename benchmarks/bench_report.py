"""Writes the tables of `benchmarks/results/cpu.json` into the documents, between their markers, and the plot.

`make bench` runs it after measuring.
"""

import json
import statistics
from pathlib import Path

from bench_rivals import RESULT
from goals import Ratio, Runs, ratios

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
PLOT = ROOT / "docs" / "throughput.svg"


def main() -> None:
    result = json.loads(RESULT.read_text())
    runs: Runs = result["runs"]
    PLOT.write_text(plot({name: statistics.median(values) for name, values in throughputs(runs).items()}))
    fill(DOCUMENT, "machine", machine_line(result))
    fill(DOCUMENT, "goals", goals_table(ratios(runs)))
    fill(DOCUMENT, "figures", figures_table(runs))
    fill(README, "goals", goals_table(ratios(runs)))


def fill(path: Path, name: str, text: str) -> None:
    """Replaces what stands between `<!-- name:start -->` and `<!-- name:end -->`, if the file has them."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found, rest = path.read_text().partition(start)
    if found:
        path.write_text(f"{before}{start}\n{text}\n{end}{rest.partition(end)[2]}")


def goals_table(found: list[Ratio]) -> str:
    lines = [
        "| work | against | ratio | runs | gate | stretch | byte floor | met |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ratio in found:
        goal = ratio.goal
        sign, digits = ("≤" if goal.smaller_is_better else "≥"), (2 if ratio.median < 2 else 1)
        lowest, highest = min(ratio.repeats), max(ratio.repeats)
        cells = [
            goal.work,
            goal.against,
            f"**{ratio.median:.{digits}f}**",
            f"{lowest:.{digits}f} … {highest:.{digits}f}",
            f"{sign} {goal.gate:g}",
            f"{sign} {goal.stretch:g}",
            "" if goal.floor is None else f"{goal.floor:g}",
            ratio.verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figures_table(runs: Runs) -> str:
    lines = ["| arm | median | least … most |", "|---|---|---|"]
    for name, values in runs.items():
        unit, digits = ("", 2) if " ms, " in name else (" tok/s", 0)
        spread = f"{min(values):.{digits}f} … {max(values):.{digits}f}"
        lines.append(f"| {name} | {statistics.median(values):.{digits}f}{unit} | {spread} |")
    return "\n".join(lines)


def machine_line(result: dict) -> str:
    machine, work = result["machine"], result["work"]
    libraries = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({machine['capability']}), Python {machine['python']}, commit "
        f"{machine['commit']}; {libraries}. {work['repeats']} repeats of {work['num_requests']} requests."
    )


def throughputs(runs: Runs) -> Runs:
    return {name: values for name, values in runs.items() if " ms, " not in name}


def plot(medians: dict[str, float], width: int = 760, row: int = 24) -> str:
    """A bar per arm, ours darker; readable on light and dark pages."""
    left, most = 250, max(medians.values())
    bars = []
    for i, (name, value) in enumerate(medians.items()):
        y, length = i * row, value / most * (width - left - 70)
        color = "#2563eb" if name.startswith(("HTTP", "in process")) else "#9ca3af"
        bars.append(
            f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{name}</text>'
            f'<rect x="{left}" y="{y + 4}" width="{length:.1f}" height="{row - 8}" rx="2" fill="{color}"/>'
            f'<text x="{left + length + 6:.1f}" y="{y + 16}">{value:.0f}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{len(medians) * row}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="#6b7280">\n<title>Output tokens per second</title>\n'
        + "\n".join(bars)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()

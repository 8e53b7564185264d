"""The plots of the measured results, as SVG."""

import statistics

from goals import Ratio
from results_file import Figures

from loraserve.cli.loadtest import svg

WIDTH = 760
LABEL_WIDTH = 230
GAP = 16
OURS = ("HTTP", "in process")
GROUPS = {
    "16 adapters": "100 M parameters, 16 adapters",
    "base": "100 M parameters, base",
    "Qwen3 fp32: ": "Qwen3-0.6B shape in float32",
    "2k prefixes: ": "2,048 shared tokens before every prompt, 4 adapters",
}


def throughput_plot(figures: Figures) -> str:
    """Output tokens per second: one bar per arm, in groups of comparable arms, best first; ours are blue."""
    charts, y = [], 0
    for group, title in GROUPS.items():
        rows = [_bar(name, values) for name, values in figures.items() if _group(name) == group]
        if not rows:
            continue
        rows.sort(key=lambda row: -row.value)
        charts.append(svg.move(svg.bars(f"{title}: output tokens per second", rows, WIDTH, LABEL_WIDTH), 0, y))
        y += svg.bars_height(len(rows)) + GAP
    return svg.document("Output tokens per second", WIDTH, y, "\n".join(charts))


def _group(figure: str) -> str | None:
    """None if the figure is not a throughput."""
    if " ms, " in figure:
        return None
    for prefix in ("Qwen3 fp32: ", "2k prefixes: "):
        if figure.startswith(prefix):
            return prefix
    return "base" if ", base" in figure else "16 adapters"


def _bar(figure: str, values: list[float]) -> svg.Bar:
    name = figure.partition(": ")[2] or figure
    median = statistics.median(values)
    color = svg.MAIN if name.startswith(OURS) else svg.OTHER
    return svg.Bar(name, median, color, min(values), max(values), text=f"{median:.0f}")


def rivals_plot(found: list[Ratio]) -> str:
    """Our throughput divided by each rival's; the line spans the least to the most of the repeats."""
    rows = [
        svg.Bar(
            f"{ratio.goal.work} / {_plain(ratio.goal.against)}",
            ratio.median,
            least=min(ratio.repeats),
            most=max(ratio.repeats),
            text=f"{ratio.median:.1f} ×" + (f" (goal {ratio.goal.gate:g} ×)" if ratio.goal.gate else ""),
        )
        for ratio in found
        if ratio.goal.is_against_rival
    ]
    rows.sort(key=lambda row: -row.value)
    content = svg.bars("Throughput, ours / theirs", rows, WIDTH - 90, 380)
    return svg.document("Throughput against rivals", WIDTH, svg.bars_height(len(rows)), content)


def _plain(markdown: str) -> str:
    return markdown.replace("`", "")

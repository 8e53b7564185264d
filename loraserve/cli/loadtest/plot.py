"""Plots a load test: the distributions of TTFT and ITL, and the adapters side by side."""

from collections.abc import Iterable, Sequence

from loraserve.cli.loadtest import svg
from loraserve.cli.loadtest.client import RequestResult
from loraserve.cli.loadtest.report import group_by_model, split_first_use
from loraserve.cli.loadtest.summary import percentiles_ms

WIDTH = 760
CHART_HEIGHT = 190
GAP = 24
MAX_BARS = 20


def plot(results: Sequence[RequestResult], *, cold: bool = False) -> str:
    """SVG. A cold test's TTFT has a curve for first uses and one for the others."""
    good = [result for result in results if result.failure is None]
    half = (WIDTH - GAP) // 2
    itl = svg.Curve("ITL", [gap_s * 1000 for result in good for gap_s in result.gaps_s])
    charts = [
        svg.cumulative("Time to first token", "ms", _ttft_curves(results, cold), half, CHART_HEIGHT),
        svg.move(svg.cumulative("Between tokens", "ms", [itl], half, CHART_HEIGHT), half + GAP, 0),
    ]
    rows = _model_bars(good)
    if len(rows) > 1:
        title = "TTFT by model, p50 in ms; the line reaches p99"
        charts.append(svg.move(svg.bars(title, rows, WIDTH), 0, CHART_HEIGHT + GAP))
    height = CHART_HEIGHT + (GAP + svg.bars_height(len(rows)) if len(rows) > 1 else 0)
    return svg.document("Load test", WIDTH, height, "\n".join(charts))


def _ttft_curves(results: Sequence[RequestResult], cold: bool) -> list[svg.Curve]:
    if not cold:
        return [svg.Curve("all", _ttft_ms(results))]
    first, later = split_first_use(results)
    return [svg.Curve("first use", _ttft_ms(first), svg.SECOND), svg.Curve("later", _ttft_ms(later))]


def _ttft_ms(results: Iterable[RequestResult]) -> list[float]:
    """TTFT of the requests that did not fail."""
    return [result.ttft_s * 1000 for result in results if result.failure is None and result.ttft_s is not None]


def _model_bars(good: Sequence[RequestResult]) -> list[svg.Bar]:
    """One bar for each of the busiest models."""
    busiest = sorted(group_by_model(good).items(), key=lambda item: -len(item[1]))[:MAX_BARS]
    found = [(model, percentiles_ms(result.ttft_s for result in results)) for model, results in busiest]
    return [svg.Bar(model, ttft.p50, least=ttft.p50, most=ttft.p99) for model, ttft in found if ttft is not None]

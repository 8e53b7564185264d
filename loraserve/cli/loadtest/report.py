"""What a load test found, as JSON and as tables."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console, Group
from rich.table import Table

from loraserve.cli.loadtest.client import RequestResult
from loraserve.cli.loadtest.runner import BenchRun

MAX_MODELS_SHOWN = 20


class Percentiles(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    """Of one model's requests, or of all. Times are of successful requests; None where there are none."""

    num_requests: int
    num_failed: int
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None


class Report(msgspec.Struct, frozen=True):
    settings: dict[str, object]
    wall_s: float
    client_cpu_s: float
    max_late_ms: float
    """How late the generator sent a request of an open loop; large = the generator was the bottleneck."""
    total: Summary
    by_model: dict[str, Summary]
    errors: dict[str, int]
    """Message → how often."""


def report(run: BenchRun, settings: dict[str, object]) -> Report:
    models = sorted({result.model for result in run.results})
    return Report(
        settings=settings,
        wall_s=run.wall_s,
        client_cpu_s=run.client_cpu_s,
        max_late_ms=max((result.late_s for result in run.results), default=0.0) * 1000,
        total=summarize(run.results, run.wall_s),
        by_model={
            model: summarize([result for result in run.results if result.model == model], run.wall_s)
            for model in models
        },
        errors=dict(Counter(result.error for result in run.results if result.error)),
    )


def summarize(results: Sequence[RequestResult], wall_s: float) -> Summary:
    good = [result for result in results if result.error is None]
    prompt_tokens = sum(result.prompt_tokens for result in good)
    output_tokens = sum(result.output_tokens for result in good)
    return Summary(
        num_requests=len(results),
        num_failed=len(results) - len(good),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / wall_s,
        requests_per_s=len(good) / wall_s,
        ttft_ms=percentiles_ms(result.ttft_s for result in good),
        itl_ms=percentiles_ms(gap_s for result in good for gap_s in result.gaps_s),
        tpot_ms=percentiles_ms(result.tpot_s for result in good),
        e2e_ms=percentiles_ms(result.e2e_s for result in good),
    )


def percentiles_ms(values_s: Iterable[float | None]) -> Percentiles | None:
    values = sorted(value * 1000 for value in values_s if value is not None)
    if not values:
        return None
    return Percentiles(
        mean=sum(values) / len(values),
        p50=_percentile(values, 0.50),
        p90=_percentile(values, 0.90),
        p99=_percentile(values, 0.99),
        max=values[-1],
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least this share of all values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def print_report(console: Console, found: Report) -> None:
    console.print(Group(_totals_table(found), _times_table(found.total), *_model_tables(found)))
    for message, count in found.errors.items():
        console.print(f"{count} failed: {message}", style="red", markup=False)


def _totals_table(found: Report) -> Table:
    table = Table("requests", "failed", "wall s", "output tok/s", "total tok/s", "requests/s", "generator CPU")
    total = found.total
    table.add_row(
        str(total.num_requests),
        str(total.num_failed),
        f"{found.wall_s:.1f}",
        f"{total.output_tokens_per_s:.1f}",
        f"{total.total_tokens_per_s:.1f}",
        f"{total.requests_per_s:.2f}",
        f"{found.client_cpu_s / found.wall_s:.0%} of a core",
    )
    return table


def _times_table(total: Summary) -> Table:
    table = Table("ms", "mean", "p50", "p90", "p99", "max")
    rows = [("TTFT", total.ttft_ms), ("ITL", total.itl_ms), ("TPOT", total.tpot_ms), ("E2E", total.e2e_ms)]
    for name, values in rows:
        if values is not None:
            table.add_row(name, *(f"{value:.1f}" for value in msgspec.structs.astuple(values)))
    return table


def _model_tables(found: Report) -> list[Table]:
    if len(found.by_model) < 2:
        return []
    table = Table("model", "requests", "failed", "output tokens", "TTFT p50 ms", "ITL p50 ms", "E2E p50 ms")
    busiest = sorted(found.by_model.items(), key=lambda item: -item[1].num_requests)
    for model, summary in busiest[:MAX_MODELS_SHOWN]:
        medians = [summary.ttft_ms, summary.itl_ms, summary.e2e_ms]
        table.add_row(
            model,
            str(summary.num_requests),
            str(summary.num_failed),
            str(summary.output_tokens),
            *("-" if values is None else f"{values.p50:.1f}" for values in medians),
        )
    return [table]

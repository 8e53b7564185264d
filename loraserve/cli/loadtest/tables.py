"""Prints the report on a terminal."""

import msgspec
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from loraserve.cli.loadtest.report import ColdReport, Report
from loraserve.cli.loadtest.summary import Percentiles, Summary

MAX_MODELS_SHOWN = 20
LATE_MS = 10.0
"""More than the inaccuracy of timers."""


def print_report(console: Console, found: Report) -> None:
    if found.interrupted:
        console.print("interrupted: unfinished requests are not counted", style="yellow")
    console.print(Group(_totals(found), _times(found.total), *_models(found), *_cold(found.cold)))
    if found.max_late_ms > LATE_MS:
        late = f"the generator fell behind: it sent up to {found.max_late_ms:.0f} ms late, which TTFT and E2E include"
        console.print(late, style="yellow")
    for code, message in found.errors.items():
        console.print(f"{found.total.errors[code]} failed: {code}: {message}", style="red", markup=False)


def _table(*headers: str) -> Table:
    return Table(*headers, box=box.SIMPLE_HEAD, collapse_padding=True)


def _totals(found: Report) -> Table:
    table = _table("requests", "failed", "wall s", "output tok/s", "total tok/s", "requests/s", "generator CPU")
    total = found.total
    cells = [
        str(total.num_requests),
        str(total.num_failed),
        f"{found.wall_s:.1f}",
        f"{total.output_tokens_per_s:.1f}",
        f"{total.total_tokens_per_s:.1f}",
        f"{total.requests_per_s:.2f}",
        f"{found.client_cpu_s / found.wall_s:.0%}",
    ]
    if total.cached_tokens:
        table.add_column("prompt cached")
        cells.append(f"{total.cached_tokens / total.prompt_tokens:.0%}")
    table.add_row(*cells)
    return table


def _times(total: Summary) -> Table:
    table = _table("ms", "mean", "p50", "p90", "p99", "max")
    rows = [("TTFT", total.ttft_ms), ("ITL", total.itl_ms), ("TPOT", total.tpot_ms), ("E2E", total.e2e_ms)]
    for name, values in rows:
        _add_times(table, name, values)
    return table


def _add_times(table: Table, name: str, values: Percentiles | None) -> None:
    if values is not None:
        table.add_row(name, *(f"{value:.1f}" for value in msgspec.structs.astuple(values)))


def _models(found: Report) -> list[Table]:
    if len(found.by_model) < 2:
        return []
    busiest = sorted(found.by_model.items(), key=lambda item: -item[1].num_requests)
    table = _table("model", "sent", "failed", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50")
    for column in table.columns[1:]:
        column.no_wrap = True
    table.columns[0].overflow = "fold"
    for model, summary in busiest[:MAX_MODELS_SHOWN]:
        table.add_row(
            Text(model),
            str(summary.num_requests),
            str(summary.num_failed),
            f"{summary.output_tokens_per_s:.1f}",
            *_p50_p99(summary.ttft_ms),
            *_p50_p99(summary.itl_ms),
            _p50_p99(summary.e2e_ms)[0],
        )
    if len(busiest) > MAX_MODELS_SHOWN:
        table.caption = f"the busiest {MAX_MODELS_SHOWN} of {len(busiest)}; --json has all"
    return [table]


def _p50_p99(values: Percentiles | None) -> tuple[str, str]:
    return ("-", "-") if values is None else (f"{values.p50:.1f}", f"{values.p99:.1f}")


def _cold(found: ColdReport | None) -> list[Table]:
    if found is None:
        return []
    table = _table("TTFT ms", "requests", "mean", "p50", "p90", "p99", "max")
    for name, summary in (("first use", found.first_use), ("later", found.later)):
        if summary is not None and summary.ttft_ms is not None:
            times = (f"{value:.1f}" for value in msgspec.structs.astuple(summary.ttft_ms))
            table.add_row(name, str(summary.num_requests), *times)
    return [table]

"""The results of a load test, as JSON."""

from collections.abc import Sequence

import msgspec

from loraserve.cli.loadtest.client import RequestResult
from loraserve.cli.loadtest.runner import BenchRun
from loraserve.cli.loadtest.summary import Summary, summarize


class ColdReport(msgspec.Struct, frozen=True):
    """The first request of each model in this test, and all others."""

    first_use: Summary | None
    later: Summary | None


class Report(msgspec.Struct, frozen=True):
    settings: dict[str, object]
    interrupted: bool
    """By a signal. Unfinished requests are in none of the figures."""
    wall_s: float
    client_cpu_s: float
    max_late_ms: float
    """Longest delay with which the generator sent a request of an open loop; its TTFT and E2E include it. Large = the
    generator was the bottleneck."""
    total: Summary
    by_model: dict[str, Summary]
    errors: dict[str, str]
    """Failure code → the first message with that code."""
    cold: ColdReport | None = None


def report(run: BenchRun, settings: dict[str, object], *, cold: bool = False) -> Report:
    by_model = group_by_model(run.results)
    messages: dict[str, str] = {}
    for result in run.results:
        if result.failure:
            messages.setdefault(result.failure.code, result.failure.message)
    return Report(
        settings=settings,
        interrupted=run.interrupted_by is not None,
        wall_s=run.wall_s,
        client_cpu_s=run.client_cpu_s,
        max_late_ms=max((result.late_s for result in run.results), default=0.0) * 1000,
        total=summarize(run.results, run.wall_s),
        by_model={model: summarize(results, run.wall_s) for model, results in by_model.items()},
        errors=messages,
        cold=_cold(run) if cold else None,
    )


def group_by_model(results: Sequence[RequestResult]) -> dict[str, list[RequestResult]]:
    """Sorted by name; each model's requests in the order of sending."""
    groups: dict[str, list[RequestResult]] = {}
    for result in sorted(results, key=lambda result: (result.model, result.sent_s)):
        groups.setdefault(result.model, []).append(result)
    return groups


def split_first_use(results: Sequence[RequestResult]) -> tuple[list[RequestResult], list[RequestResult]]:
    """Each model's first request, and all others."""
    groups = group_by_model(results).values()
    return [group[0] for group in groups], [result for group in groups for result in group[1:]]


def _cold(run: BenchRun) -> ColdReport:
    first, later = (summarize(part, run.wall_s) if part else None for part in split_first_use(run.results))
    return ColdReport(first, later)

"""GET /v1/series: data for charts."""

from collections.abc import Callable

from litestar import Request, get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.needs import needs
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.schemas.series import SeriesView
from loraserve.control.monitoring.series_records import SeriesSample
from loraserve.control.monitoring.series_reports import Chart, Window
from loraserve.control.tenancy.principal import Action
from loraserve.serving.telemetry.latency_histogram import percentile_ms

Column = list[float | None]


@get("/v1/series", opt=needs(Action.READ), responses=ERROR_RESPONSES, tags=["live"])
async def get_series(
    request: Request, context: NamedDependency[AppContext], window: FromQuery[Window] = Window.QUARTER
) -> SeriesView:
    """The last 15 minutes, hour or 24 hours in equal steps, for all engines together.

    With a key for one tenant: only that tenant's requests, counted when they end. What tenants share (running and
    waiting sequences, memory and loads into it, time between tokens) is then null.
    """
    chart = await context.control.observer.series.chart(principal_of(request), window)
    return SeriesView(
        step_s=chart.step_s,
        at=chart.at,
        output_tokens_per_s=_rate(chart, lambda sample: sample.output_tokens),
        prompt_tokens_per_s=_rate(chart, lambda sample: sample.prompt_tokens),
        requests_per_s=_rate(chart, lambda sample: sample.num_requests),
        errors_per_s=_rate(chart, lambda sample: sample.num_errors),
        num_running=_shared(chart, lambda sample: sample.num_running),
        num_waiting=_shared(chart, lambda sample: sample.num_waiting),
        kv_used=_shared(chart, lambda sample: _share(sample.kv_used_blocks, sample.kv_blocks)),
        arena_used=_shared(chart, lambda sample: _share(sample.arena_used_bytes, sample.arena_size_bytes)),
        num_adapter_loads=_shared(chart, lambda sample: sample.num_adapter_loads),
        num_adapter_evictions=_shared(chart, lambda sample: sample.num_adapter_evictions),
        cache_hit=_column(chart, lambda sample: _share(sample.cache_hits, sample.cache_queries)),
        ttft_p50_ms=_column(chart, lambda sample: percentile_ms(sample.ttft, 0.5)),
        ttft_p95_ms=_column(chart, lambda sample: percentile_ms(sample.ttft, 0.95)),
        itl_p50_ms=_column(chart, lambda sample: percentile_ms(sample.itl, 0.5)),
        itl_p95_ms=_column(chart, lambda sample: percentile_ms(sample.itl, 0.95)),
    )


def _rate(chart: Chart, count: Callable[[SeriesSample], int]) -> Column:
    return _column(chart, lambda sample: count(sample) / sample.duration_s)


def _shared(chart: Chart, value: Callable[[SeriesSample], float | None]) -> Column:
    """For a value that tenants share."""
    return _column(chart, value) if chart.of_engines else [None] * len(chart.at)


def _column(chart: Chart, value: Callable[[SeriesSample], float | None]) -> Column:
    return [None if sample is None else _rounded(value(sample)) for sample in chart.samples]


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

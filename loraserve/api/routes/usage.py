"""GET /v1/usage."""

import asyncio
import time
from enum import StrEnum
from typing import Annotated

from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.needs import needs
from loraserve.api.management.table_format import as_attachment
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.schemas.usage_report import UsageReport, UsageRow
from loraserve.control.tenancy.principal import Action
from loraserve.control.usage.metrics import Metric
from loraserve.control.usage.reports import GroupBy, Interval, UsageQuestion, UsageTotals, as_csv
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value

DAY_S = 24 * 3600.0


class UsageFormat(StrEnum):
    JSON = "json"
    CSV = "csv"


@get("/v1/usage", opt=needs(Action.READ), responses=ERROR_RESPONSES, tags=["usage"])
async def get_usage(
    request: Request,
    context: NamedDependency[AppContext],
    start: Annotated[float | None, QueryParameter(name="from")] = None,
    end: Annotated[float | None, QueryParameter(name="to")] = None,
    interval: FromQuery[Interval] = Interval.TOTAL,
    group_by: FromQuery[str] = "",
    adapter: FromQuery[str | None] = None,
    key_id: FromQuery[str | None] = None,
    wanted_format: Annotated[UsageFormat, QueryParameter(name="format")] = UsageFormat.JSON,
) -> Response[UsageReport]:
    """Requests and tokens served, by UTC hour (kept for 8 days) or day (400 days), or in total.

    `from` and `to`: Unix seconds; default: the last 24 hours. Every hour or day that they touch is included; a `from`
    before the kept period is refused. A total covers whole hours if they are kept, otherwise whole days. `group_by`:
    any of tenant, key, adapter, version, separated by commas; grouping by tenant covers all tenants and needs a key for
    all tenants (`*`). `adapter`: only this adapter; empty: the base model. Shared adapters are called "shared/<name>"
    in rows; `adapter` also accepts their bare name. `format`: json or csv. More than 50,000 rows are refused.
    """
    principal, groups = principal_of(request), _groups(group_by)
    if GroupBy.TENANT in groups and not principal.is_any_tenant:
        message = "'group_by' names tenant: only a key for all tenants ('*') sees other tenants' usage."
        raise ServingError(ErrorCode.FORBIDDEN, message, param="group_by")
    to = time.time() if end is None else end
    question = UsageQuestion(
        start=to - DAY_S if start is None else start,
        end=to,
        interval=interval,
        group_by=groups,
        adapter=adapter,
        key_id=key_id,
        every_tenant=GroupBy.TENANT in groups,
    )
    answer = await context.control.observer.usage.answer(principal, question)
    if wanted_format is UsageFormat.CSV:
        return as_attachment(await asyncio.to_thread(as_csv, answer.rows), "text/csv", "usage.csv")
    rows = await asyncio.to_thread(lambda: [_row(row) for row in answer.rows])
    return Response(UsageReport(interval=interval, data=rows, complete=answer.is_complete))


def _groups(text: str) -> frozenset[GroupBy]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        return frozenset(GroupBy(name) for name in names)
    except ValueError:
        known = ", ".join(GroupBy)
        raise invalid_value("group_by", f"is {text[:64]!r}; it takes any of {known}, separated by commas.") from None


def _row(row: UsageTotals) -> UsageRow:
    return UsageRow(
        start=row.start,
        tenant=row.tenant,
        key_id=row.key_id,
        adapter=row.adapter,
        version=row.version,
        num_requests=row.count(Metric.REQUESTS),
        num_errors=row.count(Metric.ERRORS),
        num_prompt_tokens=row.count(Metric.PROMPT_TOKENS),
        num_cached_tokens=row.count(Metric.CACHED_TOKENS),
        num_output_tokens=row.count(Metric.OUTPUT_TOKENS),
        ttft_p50_ms=row.ttft_ms(0.5),
        ttft_p95_ms=row.ttft_ms(0.95),
    )

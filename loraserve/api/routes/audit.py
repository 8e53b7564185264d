"""GET /v1/audit."""

import asyncio
from enum import StrEnum
from typing import Annotated, Any, cast

import msgspec
from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.needs import needs
from loraserve.api.management.table_format import as_attachment, streamed_attachment
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.schemas.audit import AuditItem, AuditList
from loraserve.control.csv_text import csv_text
from loraserve.control.paging import DEFAULT_PAGE
from loraserve.control.tenancy.audit_trail import AuditedAct, AuditQuery
from loraserve.control.tenancy.principal import Action

COLUMNS = ("id", "at", "actor", "action", "outcome", "kind", "subject", "tenant", "request_id", "detail")


class AuditFormat(StrEnum):
    JSON = "json"
    NDJSON = "ndjson"
    CSV = "csv"


@get("/v1/audit", opt=needs(Action.ADMINISTER), responses=ERROR_RESPONSES, tags=["audit"])
async def list_audit(
    request: Request,
    context: NamedDependency[AppContext],
    actor: FromQuery[str | None] = None,
    action: FromQuery[str | None] = None,
    kind: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
    cursor: FromQuery[str | None] = None,
    wanted_format: Annotated[AuditFormat, QueryParameter(name="format")] = AuditFormat.JSON,
) -> Response[AuditList]:
    """The tenant's changes, logins and refusals, newest first; with a key for all tenants (`*`), those of all tenants.

    `action`: exact, or a prefix if it ends in a dot ("alias."). `actor` and `kind`: exact. `limit`: items per page, 1
    to 500. `format`: ndjson or csv exports the newest 10,000 entries. The documents before and after a change are
    missing once their revisions are pruned, and from CSV.
    """
    principal = principal_of(request)
    query = AuditQuery(actor=actor, action=action, kind=kind, limit=limit, cursor=cursor)
    trail = context.control.observer.audit
    if wanted_format is AuditFormat.JSON:
        page = await trail.list(principal, query)
        return Response(AuditList([audit_item(act) for act in page.items], page.next_cursor))
    acts = await trail.export(principal, query, with_documents=wanted_format is not AuditFormat.CSV)
    items = map(audit_item, acts)
    if wanted_format is AuditFormat.CSV:
        text = await asyncio.to_thread(csv_text, COLUMNS, map(_row, items))
        return as_attachment(text, "text/csv", "audit.csv")
    return streamed_attachment(map(_line, items), "application/x-ndjson", "audit.ndjson")


def audit_item(act: AuditedAct) -> AuditItem:
    entry = act.entry
    return AuditItem(
        id=act.position,
        at=entry.at,
        actor=entry.actor,
        action=entry.action,
        outcome="refused" if act.was_refused else "done",
        kind=entry.kind,
        subject=entry.id,
        tenant=entry.tenant,
        request_id=entry.request_id,
        detail=entry.detail,
        before=cast(dict[str, Any] | None, act.before),
        after=cast(dict[str, Any] | None, act.after),
    )


def _row(item: AuditItem) -> list[object]:
    return [getattr(item, column) for column in COLUMNS]


def _line(item: AuditItem) -> bytes:
    return msgspec.json.encode(item) + b"\n"

"""/v1/requests: list, read and end inference requests."""

from typing import Annotated

import msgspec
from litestar import Request, delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.needs import needs
from loraserve.api.openapi.document import ERROR_RESPONSES
from loraserve.api.schemas.requests import RequestItem, RequestList
from loraserve.control.paging import DEFAULT_PAGE
from loraserve.control.requests.service import RequestQuery
from loraserve.control.requests.snapshot_records import RequestRecord, RequestState
from loraserve.control.tenancy.principal import Action


@get("/v1/requests", opt=needs(Action.READ), responses=ERROR_RESPONSES, tags=["requests"])
async def list_requests(
    request: Request,
    context: NamedDependency[AppContext],
    adapter: FromQuery[str | None] = None,
    wanted_state: Annotated[RequestState | None, QueryParameter(name="state")] = None,
    key_id: FromQuery[str | None] = None,
    tenant: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
    cursor: FromQuery[str | None] = None,
) -> RequestList:
    """Running requests, newest first, then about the last 5,000 ended ones of each tenant, latest end first.

    `adapter`: only requests to this adapter; empty: to the base model. `tenant`: another tenant, or `*` for all
    tenants; needs a key for all tenants (`*`). `limit`: items per page, 1 to 500.
    """
    query = RequestQuery(adapter=adapter, state=wanted_state, key_id=key_id, tenant=tenant, limit=limit, cursor=cursor)
    page = await context.control.observer.requests.list(principal_of(request), query)
    return RequestList([request_item(record) for record in page.items], page.next_cursor)


@get("/v1/requests/{request_id:str}", opt=needs(Action.READ), responses=ERROR_RESPONSES, tags=["requests"])
async def get_request(request: Request, context: NamedDependency[AppContext], request_id: FromPath[str]) -> RequestItem:
    """One request; 404 if it ended too long ago."""
    return request_item(await context.control.observer.requests.get(principal_of(request), request_id))


@delete("/v1/requests/{request_id:str}", opt=needs(Action.OPERATE), responses=ERROR_RESPONSES, tags=["requests"])
async def abort_request(request: Request, context: NamedDependency[AppContext], request_id: FromPath[str]) -> None:
    """End a request within two seconds, on whichever server it runs. Output delivered so far is billed. Does nothing if
    it has ended."""
    await context.control.observer.requests.abort(principal_of(request), request_id)


def request_item(record: RequestRecord) -> RequestItem:
    fields = msgspec.structs.asdict(record)
    del fields["adapter_tenant"]
    return RequestItem(**fields)

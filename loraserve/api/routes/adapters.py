"""/v1/adapters: list, read, change, delete and restore adapters."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from litestar import Request, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, QueryParameter

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.needs import needs
from loraserve.api.http.request_id import request_id_of
from loraserve.api.management.answers import changed, shown
from loraserve.api.management.etags import expected_rev
from loraserve.api.openapi.document import ERROR_RESPONSES, json_body
from loraserve.api.openapi.operation_docs import IF_MATCH, IF_NONE_MATCH, heeds
from loraserve.api.schemas.adapters import AdapterDetail, AdapterItem, AdapterList, PatchAdapterRequest
from loraserve.control.adapters.queries import NOTHING_USED, AdapterQuery, AdapterSort, AdapterState
from loraserve.control.adapters.service import AdapterPatch
from loraserve.control.paging import DEFAULT_PAGE
from loraserve.control.tenancy.principal import Action
from loraserve.control.usage.request_totals import AdapterKey
from loraserve.control.usage.traffic import NO_TRAFFIC, AdapterTraffic
from loraserve.live.errors import LiveUnavailableError
from loraserve.store.records import AdapterDoc, Document

DRAINING = ResponseSpec(
    AdapterItem, description="Deleted, but still in use by a request or an engine.", generate_examples=False
)
PATCH_DECODER = msgspec.json.Decoder(PatchAdapterRequest, strict=True)


@get("/v1/adapters", opt=needs(Action.READ), responses=ERROR_RESPONSES, tags=["adapters"])
async def list_adapters(
    request: Request,
    context: NamedDependency[AppContext],
    q: FromQuery[str] = "",
    tag: FromQuery[str | None] = None,
    wanted_state: Annotated[AdapterState | None, QueryParameter(name="state")] = None,
    sort: FromQuery[AdapterSort] = AdapterSort.NAME,
    limit: FromQuery[int] = DEFAULT_PAGE,
    cursor: FromQuery[str | None] = None,
) -> AdapterList:
    """The tenant's adapters and the shared ones.

    `q`: part of the name or the description, ignoring case. `tag`: only adapters with this tag. `state`: only adapters
    in this state; left out, all except deleted ones. `limit`: items per page, 1 to 500.
    """
    query = AdapterQuery(q=q, tag=tag, state=wanted_state, sort=sort, limit=limit, cursor=cursor)
    traffic = await _traffic(request, context)
    page = context.control.adapters.list(principal_of(request), query, traffic or NOTHING_USED)
    return AdapterList(
        [
            context.adapter_items.item(principal_of(request), document, _of(traffic, document))
            for document in page.items
        ],
        page.next_cursor,
    )


@get(
    "/v1/adapters/{name:str}",
    opt={**needs(Action.READ), **heeds(IF_NONE_MATCH)},
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def get_adapter(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str]
) -> Response[AdapterDetail]:
    """One adapter with its aliases and versions; also a deleted one."""
    document = await context.control.adapters.read(principal_of(request), name, with_deleted=True)
    traffic = await _traffic(request, context)
    return shown(
        request,
        document.rev,
        context.adapter_items.detail(principal_of(request), document, _of(traffic, document)),
    )


@patch(
    "/v1/adapters/{name:str}",
    opt={**needs(Action.OPERATE), **heeds(IF_MATCH)},
    operation_class=json_body(PatchAdapterRequest),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def patch_adapter(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str]
) -> Response[AdapterDetail]:
    """Change its description or tags, or enable or disable it."""
    body = await decode_body(request, PATCH_DECODER)
    document = await context.control.adapters.patch(
        principal_of(request),
        request_id_of(request.scope),
        name,
        AdapterPatch(body.description, body.tags, body.enabled),
        expected_rev=expected_rev(request),
    )
    return changed(document.rev, context.adapter_items.detail(principal_of(request), document))


@delete(
    "/v1/adapters/{name:str}",
    opt={**needs(Action.OPERATE), **heeds(IF_MATCH)},
    status_code=200,
    responses={**ERROR_RESPONSES, 202: DRAINING},
    tags=["adapters"],
)
async def delete_adapter(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str], drain_s: FromQuery[float] = 30.0
) -> Response[AdapterItem]:
    """Delete an adapter. New requests no longer find it; running ones are aborted after `drain_s` seconds (0 to 600).

    200 once no request and no engine uses it; 202 if some still do shortly after `drain_s`. It can be restored for 24
    hours.
    """
    deletion = await context.control.adapters.delete(
        principal_of(request), request_id_of(request.scope), name, drain_s=drain_s, expected_rev=expected_rev(request)
    )
    document = deletion.document
    return changed(
        document.rev, context.adapter_items.item(principal_of(request), document), 200 if deletion.drained else 202
    )


@post(
    "/v1/adapters/{name:str}/restore",
    opt={**needs(Action.OPERATE), **heeds(IF_MATCH)},
    status_code=200,
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def restore_adapter(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str]
) -> Response[AdapterDetail]:
    """Restore a deleted adapter, within 24 hours of its deletion."""
    document = await context.control.adapters.restore(
        principal_of(request), request_id_of(request.scope), name, expected_rev=expected_rev(request)
    )
    return changed(document.rev, context.adapter_items.detail(principal_of(request), document))


async def _traffic(request: Request, context: AppContext) -> Mapping[AdapterKey, AdapterTraffic] | None:
    """None while Redis is unreachable, so that adapters can still be listed."""
    try:
        return await context.control.observer.traffic.of(principal_of(request))
    except LiveUnavailableError:
        return None


def _of(traffic: Mapping[AdapterKey, AdapterTraffic] | None, document: Document[AdapterDoc]) -> AdapterTraffic | None:
    return None if traffic is None else traffic.get((document.doc.tenant, document.doc.name), NO_TRAFFIC)

"""/v1/tenants."""

import msgspec
from litestar import Request, Response, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from loraserve.api.answers import changed, shown
from loraserve.api.app_context import AppContext
from loraserve.api.auth import principal_of
from loraserve.api.decoding import decode_body
from loraserve.api.etags import expected_rev
from loraserve.api.needs import needs
from loraserve.api.openapi import ERROR_RESPONSES, json_body
from loraserve.api.operation_docs import IF_MATCH, IF_NONE_MATCH, heeds
from loraserve.api.request_id import request_id_of
from loraserve.api.schemas.tenants import CreateTenantRequest, PatchTenantRequest, TenantItem, TenantList
from loraserve.control.paging import DEFAULT_PAGE
from loraserve.control.principal import Action
from loraserve.control.tenants import TenantPatch
from loraserve.store.records import Document, TenantDoc

CREATE_DECODER = msgspec.json.Decoder(CreateTenantRequest, strict=True)
PATCH_DECODER = msgspec.json.Decoder(PatchTenantRequest, strict=True)


@get("/v1/tenants", opt=needs(Action.READ), responses=ERROR_RESPONSES, tags=["tenants"])
async def list_tenants(
    request: Request,
    context: NamedDependency[AppContext],
    limit: FromQuery[int] = DEFAULT_PAGE,
    cursor: FromQuery[str | None] = None,
) -> TenantList:
    """All of them with a key for all tenants (`*`), else one's own."""
    page = context.control.tenants.list(principal_of(request), limit=limit, cursor=cursor)
    return TenantList([_item(context, document) for document in page.items], page.next_cursor)


@get(
    "/v1/tenants/{tenant:str}",
    opt={**needs(Action.READ), **heeds(IF_NONE_MATCH)},
    responses=ERROR_RESPONSES,
    tags=["tenants"],
)
async def get_tenant(
    request: Request, context: NamedDependency[AppContext], tenant: FromPath[str]
) -> Response[TenantItem]:
    document = await context.control.tenants.read(principal_of(request), tenant)
    return shown(request, document.rev, lambda: _item(context, document))


@post(
    "/v1/tenants",
    opt=needs(Action.ADMINISTER_ALL),
    operation_class=json_body(CreateTenantRequest),
    responses=ERROR_RESPONSES,
    tags=["tenants"],
)
async def create_tenant(request: Request, context: NamedDependency[AppContext]) -> Response[TenantItem]:
    asked = await decode_body(request, CREATE_DECODER)
    document = await context.control.tenants.create(
        principal_of(request),
        request_id_of(request.scope),
        asked.id,
        description=asked.description,
        limits=asked.limits,
        weight=asked.weight,
    )
    return changed(document.rev, _item(context, document), 201)


@patch(
    "/v1/tenants/{tenant:str}",
    opt={**needs(Action.ADMINISTER_ALL), **heeds(IF_MATCH)},
    operation_class=json_body(PatchTenantRequest),
    responses=ERROR_RESPONSES,
    tags=["tenants"],
)
async def patch_tenant(
    request: Request, context: NamedDependency[AppContext], tenant: FromPath[str]
) -> Response[TenantItem]:
    """Holds from the next request on; what a suspended tenant runs ends with an error within 5 s."""
    asked = await decode_body(request, PATCH_DECODER)
    document = await context.control.tenants.patch(
        principal_of(request),
        request_id_of(request.scope),
        tenant,
        TenantPatch(description=asked.description, status=asked.status, limits=asked.limits, weight=asked.weight),
        expected_rev=expected_rev(request),
    )
    return changed(document.rev, _item(context, document))


def _item(context: AppContext, document: Document[TenantDoc]) -> TenantItem:
    tenant, holdings = document.doc, context.control.tenants.holdings(document.id)
    return TenantItem(
        id=document.id,
        description=tenant.description,
        status=tenant.status,
        limits=tenant.limits,
        weight=tenant.weight,
        num_adapters=holdings.num_adapters,
        adapter_bytes=holdings.adapter_bytes,
        num_keys=holdings.num_keys,
        updated_at=document.at,
        rev=document.rev,
    )

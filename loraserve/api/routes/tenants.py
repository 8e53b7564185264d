"""/v1/tenants."""

import msgspec
from litestar import Request, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.needs import needs
from loraserve.api.http.request_id import request_id_of
from loraserve.api.management.answers import changed, shown
from loraserve.api.management.etags import expected_rev
from loraserve.api.openapi.document import ERROR_RESPONSES, json_body
from loraserve.api.openapi.operation_docs import IF_MATCH, IF_NONE_MATCH, heeds
from loraserve.api.schemas.tenants import CreateTenantRequest, PatchTenantRequest, TenantItem, TenantList
from loraserve.control.documents.tenant_edits import TenantState
from loraserve.control.paging import DEFAULT_PAGE
from loraserve.control.tenancy.principal import Action
from loraserve.control.tenancy.tenants import TenantPatch
from loraserve.store.records import Document, TenantDoc

DRAINING = ResponseSpec(
    TenantItem, description="Deleted, but still in use by a server or an engine.", generate_examples=False
)
CREATE_DECODER = msgspec.json.Decoder(CreateTenantRequest, strict=True)
PATCH_DECODER = msgspec.json.Decoder(PatchTenantRequest, strict=True)


@get("/v1/tenants", opt=needs(Action.READ), responses=ERROR_RESPONSES, tags=["tenants"])
async def list_tenants(
    request: Request,
    context: NamedDependency[AppContext],
    deleted: FromQuery[bool] = False,
    limit: FromQuery[int] = DEFAULT_PAGE,
    cursor: FromQuery[str | None] = None,
) -> TenantList:
    """All tenants with a key for all tenants (`*`), otherwise your own; by id.

    `deleted`: true lists only deleted tenants; false, only the others. `limit`: items per page, 1 to 500.
    """
    page = context.control.tenants.list(principal_of(request), deleted=deleted, limit=limit, cursor=cursor)
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
    """One tenant; also a deleted one."""
    document = await context.control.tenants.read(principal_of(request), tenant)
    return shown(request, document.rev, _item(context, document))


@post(
    "/v1/tenants",
    opt=needs(Action.ADMINISTER_ALL),
    operation_class=json_body(CreateTenantRequest),
    responses=ERROR_RESPONSES,
    tags=["tenants"],
)
async def create_tenant(request: Request, context: NamedDependency[AppContext]) -> Response[TenantItem]:
    """Create a tenant. The id of a deleted tenant cannot be used again."""
    body = await decode_body(request, CREATE_DECODER)
    document = await context.control.tenants.create(
        principal_of(request),
        request_id_of(request.scope),
        body.id,
        description=body.description,
        limits=body.limits,
        weight=body.weight,
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
    """Change a tenant, from the next request on. Running requests of a suspended tenant end with an error within 5
    seconds."""
    body = await decode_body(request, PATCH_DECODER)
    document = await context.control.tenants.patch(
        principal_of(request),
        request_id_of(request.scope),
        tenant,
        TenantPatch(description=body.description, status=body.status, limits=body.limits, weight=body.weight),
        expected_rev=expected_rev(request),
    )
    return changed(document.rev, _item(context, document))


@delete(
    "/v1/tenants/{tenant:str}",
    opt={**needs(Action.ADMINISTER_ALL), **heeds(IF_MATCH)},
    status_code=200,
    responses={**ERROR_RESPONSES, 202: DRAINING},
    tags=["tenants"],
)
async def delete_tenant(
    request: Request, context: NamedDependency[AppContext], tenant: FromPath[str]
) -> Response[TenantItem]:
    """Delete a tenant. Its keys are refused from the next request on, and its running requests are aborted. 200 once
    nothing of it runs any more.

    For 24 hours it can be restored with its keys and adapters; after that, everything but its usage is erased.
    """
    deletion = await context.control.tenant_deletion.delete(
        principal_of(request), request_id_of(request.scope), tenant, expected_rev=expected_rev(request)
    )
    document = deletion.document
    return changed(document.rev, _item(context, document, deletion.state), 200 if deletion.drained else 202)


@post(
    "/v1/tenants/{tenant:str}/restore",
    opt={**needs(Action.ADMINISTER_ALL), **heeds(IF_MATCH)},
    status_code=200,
    responses=ERROR_RESPONSES,
    tags=["tenants"],
)
async def restore_tenant(
    request: Request, context: NamedDependency[AppContext], tenant: FromPath[str]
) -> Response[TenantItem]:
    """Restore a deleted tenant with its keys and adapters as they were, within 24 hours of its deletion."""
    document = await context.control.tenant_deletion.restore(
        principal_of(request), request_id_of(request.scope), tenant, expected_rev=expected_rev(request)
    )
    return changed(document.rev, _item(context, document))


def _item(context: AppContext, document: Document[TenantDoc], state: TenantState | None = None) -> TenantItem:
    """state: None = as this server sees it."""
    tenant, holdings = document.doc, context.control.tenants.holdings(document.id)
    return TenantItem(
        id=document.id,
        description=tenant.description,
        status=state or context.control.tenant_deletion.state_of(document),
        limits=tenant.limits,
        weight=tenant.weight,
        num_adapters=holdings.num_adapters,
        adapter_bytes=holdings.adapter_bytes,
        num_keys=holdings.num_keys,
        updated_at=document.at,
        deleted_at=tenant.deleted_at,
        erased_at=tenant.erased_at,
        rev=document.rev,
    )

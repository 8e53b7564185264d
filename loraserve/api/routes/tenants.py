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

DRAINING = ResponseSpec(TenantItem, description="Some server or engine has not let go yet.", generate_examples=False)
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
    """With a key for all tenants (`*`) all of them, else one's own. `deleted`: those that are, and no others."""
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
    """Deleted ones too."""
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
    """Its keys are refused from the next request on, and what runs is aborted. 200 when nothing of it runs any more.

    It can be restored for 24 hours, with its keys and adapters; after them all of it but its usage is erased.
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
    """Within 24 hours after its deletion, with its keys and adapters as they were."""
    document = await context.control.tenant_deletion.restore(
        principal_of(request), request_id_of(request.scope), tenant, expected_rev=expected_rev(request)
    )
    return changed(document.rev, _item(context, document))


def _item(context: AppContext, document: Document[TenantDoc], state: TenantState | None = None) -> TenantItem:
    """state: None = by this server."""
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

"""/v1/keys."""

import time

import msgspec
from litestar import Request, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body, decode_optional
from loraserve.api.http.needs import needs
from loraserve.api.http.ranges import check_range
from loraserve.api.http.request_id import request_id_of
from loraserve.api.management.answers import changed, shown
from loraserve.api.management.etags import etag_header, expected_rev
from loraserve.api.management.idempotency import once
from loraserve.api.management.key_items import created_key, key_item
from loraserve.api.openapi.document import ERROR_RESPONSES, json_body
from loraserve.api.openapi.operation_docs import IDEMPOTENCY_KEY, IF_MATCH, IF_NONE_MATCH, heeds
from loraserve.api.schemas.keys import (
    CreatedKey,
    CreateKeyRequest,
    KeyItem,
    KeyList,
    PatchKeyRequest,
    RotateKeyRequest,
)
from loraserve.control.paging import DEFAULT_PAGE
from loraserve.control.tenancy.key_documents import MAX_LIFE_S, KeyPatch
from loraserve.control.tenancy.principal import Action

MAX_GRACE_S = 30 * 24 * 3600
CREATE_DECODER = msgspec.json.Decoder(CreateKeyRequest, strict=True)
PATCH_DECODER = msgspec.json.Decoder(PatchKeyRequest, strict=True)
ROTATE_DECODER = msgspec.json.Decoder(RotateKeyRequest, strict=True)


@get("/v1/keys", opt=needs(Action.ADMINISTER), responses=ERROR_RESPONSES, tags=["keys"])
async def list_keys(
    request: Request,
    context: NamedDependency[AppContext],
    tenant: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
    cursor: FromQuery[str | None] = None,
) -> KeyList:
    """API keys, newest first, including revoked ones.

    `tenant`: only that tenant's keys, without those for all tenants (`*`); left out, all that you may see. `limit`:
    items per page, 1 to 500.
    """
    page = context.control.keys.list(principal_of(request), tenant=tenant, limit=limit, cursor=cursor)
    return KeyList([key_item(document) for document in page.items], page.next_cursor)


@get(
    "/v1/keys/{key_id:str}",
    opt={**needs(Action.ADMINISTER), **heeds(IF_NONE_MATCH)},
    responses=ERROR_RESPONSES,
    tags=["keys"],
)
async def get_key(request: Request, context: NamedDependency[AppContext], key_id: FromPath[str]) -> Response[KeyItem]:
    """One API key, without its secret."""
    document = await context.control.keys.read(principal_of(request), key_id)
    return shown(request, document.rev, key_item(document))


@post(
    "/v1/keys",
    opt={**needs(Action.ADMINISTER), **heeds(IDEMPOTENCY_KEY)},
    operation_class=json_body(CreateKeyRequest),
    responses=ERROR_RESPONSES,
    tags=["keys"],
)
async def create_key(request: Request, context: NamedDependency[AppContext]) -> Response[CreatedKey]:
    """Create an API key. Only this answer contains the secret. With an Idempotency-Key, a repeated request creates no
    second key.

    At most 1,000 keys per tenant, not counting revoked and expired ones.
    """
    body = await decode_body(request, CREATE_DECODER)
    if body.expires_in_s is not None:
        check_range("expires_in_s", body.expires_in_s, 1, MAX_LIFE_S)

    async def create() -> CreatedKey:
        issued = await context.control.keys.create(
            principal_of(request),
            request_id_of(request.scope),
            role=body.role,
            tenant=body.tenant,
            name=body.name,
            adapters=body.adapters,
            limits=body.limits,
            expires_at=None if body.expires_in_s is None else time.time() + body.expires_in_s,
        )
        return created_key(issued)

    created = await once(request, context.control.live.sessions, create, CreatedKey, kept=without_secret)
    return Response(created, headers=etag_header(created.rev))


@patch(
    "/v1/keys/{key_id:str}",
    opt={**needs(Action.ADMINISTER), **heeds(IF_MATCH)},
    operation_class=json_body(PatchKeyRequest),
    responses=ERROR_RESPONSES,
    tags=["keys"],
)
async def patch_key(request: Request, context: NamedDependency[AppContext], key_id: FromPath[str]) -> Response[KeyItem]:
    """Change a key, from the next request on."""
    body = await decode_body(request, PATCH_DECODER)
    document = await context.control.keys.patch(
        principal_of(request),
        request_id_of(request.scope),
        key_id,
        KeyPatch(
            name=body.name,
            role=body.role,
            adapters=body.adapters,
            limits=body.limits,
            status=body.status,
            expires_at=body.expires_at,
        ),
        expected_rev=expected_rev(request),
    )
    return changed(document.rev, key_item(document))


@delete(
    "/v1/keys/{key_id:str}",
    opt={**needs(Action.ADMINISTER), **heeds(IF_MATCH)},
    responses=ERROR_RESPONSES,
    tags=["keys"],
)
async def revoke_key(request: Request, context: NamedDependency[AppContext], key_id: FromPath[str]) -> None:
    """Revoke a key for good. Running requests that use it end with an error within 5 seconds."""
    await context.control.keys.revoke(
        principal_of(request), request_id_of(request.scope), key_id, expected_rev=expected_rev(request)
    )


@post(
    "/v1/keys/{key_id:str}/rotate",
    opt={**needs(Action.ADMINISTER), **heeds(IF_MATCH)},
    operation_class=json_body(RotateKeyRequest, required=False),
    responses=ERROR_RESPONSES,
    tags=["keys"],
)
async def rotate_key(
    request: Request, context: NamedDependency[AppContext], key_id: FromPath[str]
) -> Response[CreatedKey]:
    """Give a key a new secret; the old one keeps working for `grace_s` seconds."""
    body = await decode_optional(request, ROTATE_DECODER, RotateKeyRequest())
    check_range("grace_s", body.grace_s, 0, MAX_GRACE_S)
    issued = await context.control.keys.rotate(
        principal_of(request),
        request_id_of(request.scope),
        key_id,
        grace_s=body.grace_s,
        expected_rev=expected_rev(request),
    )
    return changed(issued.document.rev, created_key(issued), 201)


def without_secret(created: CreatedKey) -> CreatedKey:
    """The part of an answer that is stored for repetitions."""
    return msgspec.structs.replace(created, secret=None)

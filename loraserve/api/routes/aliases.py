"""Aliases of adapters, rollback, and pins in a memory tier."""

import msgspec
from litestar import Request, Response, delete, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import principal_of
from loraserve.api.http.decoding import decode_body, decode_optional
from loraserve.api.http.needs import needs
from loraserve.api.http.ranges import check_range
from loraserve.api.http.request_id import request_id_of
from loraserve.api.management.adapter_items import alias_item
from loraserve.api.management.answers import changed
from loraserve.api.management.etags import expected_rev, must_not_exist
from loraserve.api.openapi.document import ERROR_RESPONSES, json_body
from loraserve.api.openapi.operation_docs import CREATE_ONLY, IF_MATCH, heeds
from loraserve.api.schemas.adapters import PinItem, PinRequest
from loraserve.api.schemas.aliases import AliasItem, PutAliasRequest, RollbackRequest
from loraserve.control.adapters.service import MAX_PIN_S
from loraserve.control.documents.adapter_edits import CanaryShare
from loraserve.control.tenancy.principal import Action

PUT_DECODER = msgspec.json.Decoder(PutAliasRequest, strict=True)
ROLLBACK_DECODER = msgspec.json.Decoder(RollbackRequest, strict=True)
PIN_DECODER = msgspec.json.Decoder(PinRequest, strict=True)


@put(
    "/v1/adapters/{name:str}/aliases/{alias:str}",
    opt={**needs(Action.OPERATE), **heeds(IF_MATCH, CREATE_ONLY)},
    operation_class=json_body(PutAliasRequest),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def put_alias(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str], alias: FromPath[str]
) -> Response[AliasItem]:
    """Create or move an alias. It takes effect with the next request; running requests keep their version. At most 64
    aliases per adapter."""
    body = await decode_body(request, PUT_DECODER)
    document = await context.control.aliases.put(
        principal_of(request),
        request_id_of(request.scope),
        name,
        alias,
        body.version,
        canary=None if body.canary is None else CanaryShare(body.canary.version, body.canary.weight_bp),
        expected_rev=expected_rev(request),
        create_only=must_not_exist(request),
    )
    return changed(document.rev, alias_item(alias, document.doc.aliases[alias]))


@delete(
    "/v1/adapters/{name:str}/aliases/{alias:str}",
    opt={**needs(Action.OPERATE), **heeds(IF_MATCH)},
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def delete_alias(
    request: Request, context: NamedDependency[AppContext], name: FromPath[str], alias: FromPath[str]
) -> None:
    """Delete an alias other than "live", which cannot be deleted (409)."""
    await context.control.aliases.delete(
        principal_of(request), request_id_of(request.scope), name, alias, expected_rev=expected_rev(request)
    )


@post(
    "/v1/adapters/{name:str}/rollback",
    opt={**needs(Action.OPERATE), **heeds(IF_MATCH)},
    status_code=200,
    operation_class=json_body(RollbackRequest, required=False),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def roll_back(request: Request, context: NamedDependency[AppContext], name: FromPath[str]) -> Response[AliasItem]:
    """Move an alias back to the version before its last move, and end its canary. A second call undoes the first."""
    body = await decode_optional(request, ROLLBACK_DECODER, RollbackRequest())
    document = await context.control.aliases.rollback(
        principal_of(request), request_id_of(request.scope), name, body.alias, expected_rev=expected_rev(request)
    )
    return changed(document.rev, alias_item(body.alias, document.doc.aliases[body.alias]))


@put(
    "/v1/adapters/{name:str}/residency",
    opt={**needs(Action.OPERATE), **heeds(IF_MATCH)},
    status_code=202,
    operation_class=json_body(PinRequest),
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def pin_adapter(request: Request, context: NamedDependency[AppContext], name: FromPath[str]) -> PinItem:
    """Load the live version now and keep it in memory, for `ttl_s` seconds or until the pin is removed."""
    body = await decode_body(request, PIN_DECODER)
    if body.ttl_s is not None:
        check_range("ttl_s", body.ttl_s, 1, MAX_PIN_S)
    document = await context.control.adapters.pin(
        principal_of(request),
        request_id_of(request.scope),
        name,
        body.tier,
        body.ttl_s,
        expected_rev=expected_rev(request),
    )
    pin = document.doc.pin
    assert pin is not None
    return PinItem(pin.tier, pin.until)


@delete(
    "/v1/adapters/{name:str}/residency",
    opt={**needs(Action.OPERATE), **heeds(IF_MATCH)},
    responses=ERROR_RESPONSES,
    tags=["adapters"],
)
async def unpin_adapter(request: Request, context: NamedDependency[AppContext], name: FromPath[str]) -> None:
    """Remove the pin: the adapter may be evicted again."""
    await context.control.adapters.unpin(
        principal_of(request), request_id_of(request.scope), name, expected_rev=expected_rev(request)
    )

"""Records refused requests for the audit trail."""

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from loraserve.api.http.auth import STATE_KEY, OnRefusal, address_of, method_of
from loraserve.api.http.needs import ACTION
from loraserve.api.http.request_id import request_id_of
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.control.tenancy.refusals import UNKNOWN_ACTOR, Refusals
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT

NOTED = frozenset({ErrorCode.INVALID_API_KEY, ErrorCode.FORBIDDEN, ErrorCode.TENANT_SUSPENDED})
KIND = "request"


def note_refusal(refusals: Refusals) -> OnRefusal:
    """For management routes only: refused inference requests are in the metrics, and there may be too many of them."""

    def note(connection: ASGIConnection, handler: BaseRouteHandler, error: ServingError) -> None:
        if error.code not in NOTED or handler.opt.get(ACTION) is Action.INFER:
            return
        principal: Principal | None = connection.scope["state"].get(STATE_KEY)
        refusals.note(
            actor=UNKNOWN_ACTOR if principal is None else principal.actor,
            tenant=ANY_TENANT if principal is None else principal.tenant,
            address=address_of(connection),
            subject=f"{method_of(connection)} {connection.scope['path']}",
            kind=KIND,
            code=error.code,
            request_id=request_id_of(connection.scope),
        )

    return note

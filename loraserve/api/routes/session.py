"""/v1/session: log in to and out of the console."""

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.di import NamedDependency

from loraserve.api.app_context import AppContext
from loraserve.api.http.auth import address_of, given_key, principal_of
from loraserve.api.http.decoding import decode_body
from loraserve.api.http.needs import ANY_KEY, LOGOUT, PUBLIC, needs
from loraserve.api.http.request_id import request_id_of
from loraserve.api.http.session_cookie import check_same_page, session_cookie, session_token
from loraserve.api.inference.identity import server_version
from loraserve.api.openapi.document import ERROR_RESPONSES, json_body
from loraserve.api.schemas.session import CreateLinkRequest, CreateSessionRequest, LinkItem, SessionItem
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.control.tenancy.refusals import UNKNOWN_ACTOR
from loraserve.control.tenancy.sessions import NewSession
from loraserve.live.sessions import SESSION_S, Session
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT

LOGIN_DECODER = msgspec.json.Decoder(CreateSessionRequest, strict=True)
LINK_DECODER = msgspec.json.Decoder(CreateLinkRequest, strict=True)
FAILED_LOGIN = frozenset({ErrorCode.INVALID_API_KEY, ErrorCode.FORBIDDEN, ErrorCode.TENANT_SUSPENDED})


@post(
    "/v1/session",
    opt=PUBLIC,
    status_code=200,
    operation_class=json_body(CreateSessionRequest),
    responses=ERROR_RESPONSES,
    tags=["session"],
)
async def create_session(request: Request, context: NamedDependency[AppContext]) -> Response[SessionItem]:
    """Log in with a key or with the token of a one-time link. The answer sets an HttpOnly cookie; the session lasts 12
    hours."""
    # Another site's page must not log a user in under a different identity.
    check_same_page(request)
    body = await decode_body(request, LOGIN_DECODER)
    if (body.key is None) == (body.token is None):
        message = "Give exactly one of 'key' and 'token'."
        raise ServingError(ErrorCode.INVALID_REQUEST, message, param="key")
    new = await _log_in(request, context, body)
    item = _item(context, new.principal, new.session)
    return Response(item, cookies=[session_cookie(request, new.token)])


@get("/v1/session", opt=ANY_KEY, responses=ERROR_RESPONSES, tags=["session"])
async def get_session(request: Request, context: NamedDependency[AppContext]) -> SessionItem:
    """The caller's identity and rights. On a server that requires no key, everyone is an admin."""
    principal, token = principal_of(request), session_token(request)
    came_by_cookie = token is not None and given_key(request) is None and not principal.is_open
    session = await context.control.sessions.find(token) if token is not None and came_by_cookie else None
    return _item(context, principal, session)


@delete("/v1/session", opt=LOGOUT, status_code=204, responses=ERROR_RESPONSES, tags=["session"])
async def delete_session(request: Request, context: NamedDependency[AppContext]) -> Response[None]:
    """Log out, on every server at once."""
    token = session_token(request)
    if token is not None:
        await context.control.sessions.log_out(token, request_id_of(request.scope))
    return Response(None, status_code=204, cookies=[session_cookie(request, "")])


@post(
    "/v1/session/links",
    opt=needs(Action.ADMINISTER),
    operation_class=json_body(CreateLinkRequest),
    responses=ERROR_RESPONSES,
    tags=["session"],
)
async def create_link(request: Request, context: NamedDependency[AppContext]) -> LinkItem:
    """Create a login link for someone without a key at hand, valid once within 15 minutes."""
    body = await decode_body(request, LINK_DECODER)
    principal = principal_of(request)
    key_id = body.key_id if body.key_id is not None else principal.key_id
    if key_id is None:
        message = (
            "'key_id' is missing, and there is no default, because you did not authenticate with a key that has an id."
        )
        raise ServingError(ErrorCode.MISSING_PARAMETER, message, param="key_id")
    # Raises the same 404 for a key of another tenant as for one that does not exist.
    await context.control.keys.read_delegable(principal, key_id)
    link = await context.control.sessions.make_link(key_id, principal.actor, request_id_of(request.scope))
    return LinkItem(link.token, link.expires_at)


async def _log_in(request: Request, context: AppContext, body: CreateSessionRequest) -> NewSession:
    sessions, attempts = context.control.sessions, context.control.login_attempts
    address, request_id = address_of(request), request_id_of(request.scope)
    try:
        if body.key is not None:
            return await sessions.log_in_with_key(body.key, request_id)
        assert body.token is not None
        return await sessions.log_in_with_token(body.token, request_id)
    except ServingError as error:
        if error.code in FAILED_LOGIN:
            attempts.failed(address)  # raises if there were too many
            context.control.observer.refusals.note(
                actor=UNKNOWN_ACTOR,
                tenant=ANY_TENANT,
                address=address,
                subject=UNKNOWN_ACTOR,
                kind="session",
                code=error.code,
                request_id=request_id,
            )
        raise


def _item(context: AppContext, principal: Principal, session: Session | None) -> SessionItem:
    key = context.control.catalog.key(principal.key_id) if principal.key_id is not None else None
    return SessionItem(
        open=principal.is_open,
        role=principal.role,
        tenant=principal.tenant,
        key_id=principal.key_id,
        name="" if key is None else key.doc.name,
        csrf="" if session is None else session.csrf,
        expires_at=None if session is None else session.created_at + SESSION_S,
        model=context.runtime.settings.served_model_names[0],
        version=server_version(),
    )

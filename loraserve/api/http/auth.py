"""Authenticates callers. Every route needs a key, unless it says otherwise, and a role that it names."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import HTTPScope

from loraserve.api.http.needs import ACTION, ADMITTED, ANYONE, EVERY_TENANT, PUBLIC_OPT, UNCONFIRMED
from loraserve.control.tenancy.authenticator import Authenticator
from loraserve.control.tenancy.principal import Principal
from loraserve.serving.errors import ErrorCode, ServingError

STATE_KEY = "loraserve_principal"
AGAIN_KEY = "loraserve_guard_again"
TENANT_HEADER = "x-tenant"


OnRefusal = Callable[[ASGIConnection, BaseRouteHandler, ServingError], None]


class Credentials(Protocol):
    """A way for callers to identify themselves."""

    async def principal(self, connection: ASGIConnection) -> Principal | None:
        """None: no credentials of this kind were sent. Raises `ServingError` if they are invalid."""
        ...


class KeyCredentials:
    """`Authorization: Bearer <key>` or `x-api-key: <key>`; on an open server, nothing at all."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def principal(self, connection: ASGIConnection) -> Principal | None:
        if not self._authenticator.is_open:
            _check_one_key(connection)
        return await self._authenticator.authenticate(given_key(connection), connection.headers.get(TENANT_HEADER))


class Guard:
    """Runs on the matched route, so no trick with the URL bypasses it."""

    def __init__(self, credentials: list[Credentials], authenticator: Authenticator, on_refusal: OnRefusal) -> None:
        """credentials: in order of precedence; the first kind that was sent counts."""
        self._credentials = credentials
        self._authenticator = authenticator
        self._on_refusal = on_refusal

    async def __call__(self, connection: ASGIConnection, handler: BaseRouteHandler) -> None:
        if handler.opt.get(PUBLIC_OPT):
            return
        try:
            principal = await self._principal(connection)
            self._let_in(connection, handler, await self._confirmed(handler, principal))
        except ServingError as error:
            self._on_refusal(connection, handler, error)
            raise
        connection.scope["state"][AGAIN_KEY] = partial(self._check_again, connection, handler)

    async def _check_again(self, connection: ASGIConnection, handler: BaseRouteHandler) -> None:
        principal = connection.scope["state"][STATE_KEY]
        try:
            self._let_in(connection, handler, await self._confirmed(handler, principal))
        except ServingError as error:
            self._on_refusal(connection, handler, error)
            raise

    async def _confirmed(self, handler: BaseRouteHandler, principal: Principal) -> Principal:
        if handler.opt.get(UNCONFIRMED):
            return principal
        # NOTE: admission never sees a caller that is refused here, so its role must be the newest.
        if handler.opt.get(ADMITTED) and principal.can(handler.opt[ACTION]):
            return await self._authenticator.confirm_if_behind(principal)
        return await self._authenticator.confirm(principal)

    def _let_in(self, connection: ASGIConnection, handler: BaseRouteHandler, principal: Principal) -> None:
        connection.scope["state"][STATE_KEY] = principal
        if handler.opt.get(ANYONE):
            return
        action = handler.opt.get(ACTION)
        if action is None:
            raise ServingError(ErrorCode.FORBIDDEN, "Nobody may call this.")
        principal.require(action)
        if handler.opt.get(EVERY_TENANT) and not principal.is_any_tenant:
            raise ServingError(ErrorCode.FORBIDDEN, "This shows all tenants, so it needs a key for all tenants ('*').")

    async def _principal(self, connection: ASGIConnection) -> Principal:
        for credentials in self._credentials:
            principal = await credentials.principal(connection)
            if principal is not None:
                return principal
        raise ServingError(ErrorCode.INVALID_API_KEY, "No credentials were sent.")


def principal_of(request: Request) -> Principal:
    """For routes that are not public."""
    return request.scope["state"][STATE_KEY]


async def check_again(request: Request) -> None:
    """Call once the body has arrived, which takes as long as its sender likes. Raises `ServingError` if the caller has
    lost the right to call the route in the meantime; otherwise `principal_of` has its current rights."""
    again = request.scope["state"].get(AGAIN_KEY)
    if again is not None:
        await again()


def method_of(connection: ASGIConnection) -> str:
    """All routes are HTTP routes."""
    return cast(HTTPScope, connection.scope)["method"]


def address_of(connection: ASGIConnection) -> str:
    """The socket's address; only a proxy on this machine may report another one."""
    return connection.client.host if connection.client is not None else "local"


def given_key(connection: ASGIConnection) -> str | None:
    """The key as sent; "" or None = no key. If two are sent, the one after "Bearer"."""
    bearer, own = _given_keys(connection)
    return own if not bearer and own is not None else bearer


def _check_one_key(connection: ASGIConnection) -> None:
    bearer, own = _given_keys(connection)
    if bearer and own and bearer != own:
        message = "Two API keys were sent, as 'Authorization: Bearer' and as 'x-api-key', and they differ. Send one."
        raise ServingError(ErrorCode.INVALID_API_KEY, message)


def _given_keys(connection: ASGIConnection) -> tuple[str | None, str | None]:
    """The text after "Bearer", and `x-api-key`."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None, connection.headers.get("x-api-key")

"""The console's cookie, and what else a request with it must prove."""

from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie

from loraserve.api.http.auth import TENANT_HEADER, given_key, method_of
from loraserve.api.http.open_mode import SAFE_METHODS
from loraserve.control.tenancy.principal import Principal
from loraserve.control.tenancy.sessions import SessionService, is_csrf_token
from loraserve.live.sessions import SESSION_S
from loraserve.serving.errors import ErrorCode, ServingError

CSRF_HEADER = "x-csrf-token"


class CookieCredentials:
    """A key in the headers takes precedence over the cookie.

    NOTE: browsers send cookies whichever page makes the request, so an unsafe request also needs the session's CSRF
    token, and its Origin must be this server.
    """

    def __init__(self, sessions: SessionService) -> None:
        self._sessions = sessions

    async def principal(self, connection: ASGIConnection) -> Principal | None:
        """None: no cookie, a key was sent too, or the server is open. Raises `ServingError`."""
        token = session_token(connection)
        if token is None or given_key(connection) is not None or self._sessions.is_open:
            return None
        session = await self._sessions.find(token)
        if session is None:
            raise ServingError(ErrorCode.INVALID_API_KEY, "Your session has ended. Log in again.")
        if method_of(connection) not in SAFE_METHODS:
            check_same_page(connection)
            if not is_csrf_token(session, connection.headers.get(CSRF_HEADER)):
                raise ServingError(ErrorCode.FORBIDDEN, f"{CSRF_HEADER} is missing or wrong. Reload the page.")
        return await self._sessions.principal(session, connection.headers.get(TENANT_HEADER))


def session_token(connection: ASGIConnection) -> str | None:
    return connection.cookies.get(cookie_name(connection)) or None


def session_cookie(connection: ASGIConnection, token: str) -> Cookie:
    """An empty token removes the cookie."""
    return Cookie(
        key=cookie_name(connection),
        value=token,
        path="/",
        max_age=SESSION_S if token else 0,
        secure=connection.scope["scheme"] == "https",
        httponly=True,
        samesite="strict",
    )


def cookie_name(connection: ASGIConnection) -> str:
    """Contains the port, which cookies ignore: two servers on one machine must not use each other's."""
    _, colon, port = connection.headers.get("host", "").rpartition(":")
    return f"ls_session_{port}" if colon and port.isdigit() else "ls_session"


def check_same_page(connection: ASGIConnection) -> None:
    """Checks the Origin, which browsers send with every unsafe request. Raises `ServingError` (403)."""
    origin, host = connection.headers.get("origin"), connection.headers.get("host", "")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        raise ServingError(ErrorCode.FORBIDDEN, "Requests from web pages of another origin are not allowed.")

"""Keeps web pages away from a server that needs no key: any page in a browser on this machine can reach it."""

from litestar.datastructures import Headers

from loraserve.serving.errors import ErrorCode, ServingError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
FORM_PATH = "/v1/adapters"
"""The only path that accepts forms. NOTE: a page of another site can send a form without a preflight; it is recognized
by its Origin, which browsers send with every POST."""
FILE_TYPES = ("application/octet-stream", "")
"""For PUT, which a page of another site cannot send without a preflight."""


class OpenModeProtection:
    """Checks Host (DNS rebinding), Origin and Sec-Fetch-Site (foreign pages), and the body's type (HTML forms)."""

    def __init__(self, allowed_hosts: list[str], allowed_origins: list[str]) -> None:
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._allowed_origins = frozenset(allowed_origins)

    def check(self, headers: Headers, method: str, path: str) -> None:
        """Raises `ServingError`."""
        host = headers.get("host", "")
        if _without_port(host) not in self._allowed_hosts:
            raise _forbidden("This server does not accept the host in the Host header. Add it with --allowed-hosts.")
        origin = headers.get("origin")
        if origin is not None and origin not in self._allowed_origins and origin not in _origins_of(host):
            raise _forbidden("Requests from this web page's origin are not allowed.")
        if headers.get("sec-fetch-site") == "cross-site" and origin not in self._allowed_origins:
            raise _forbidden("Requests from other web sites are not allowed.")
        if method not in SAFE_METHODS:
            _check_body_type(headers, method, path)


def _check_body_type(headers: Headers, method: str, path: str) -> None:
    given = headers.get("content-type")
    if given is None and not _has_body(headers):
        return
    content_type = (given or "").partition(";")[0].strip().lower()
    is_form = content_type == "multipart/form-data" and method == "POST" and path == FORM_PATH
    is_file = content_type in FILE_TYPES and method == "PUT"
    if content_type != "application/json" and not is_form and not is_file:
        message = "The Content-Type must be application/json, application/octet-stream for files sent with PUT, or "
        raise ServingError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, f"{message}multipart/form-data for a form at {FORM_PATH}.")


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _without_port(host: str) -> str:
    """ "localhost:8000" → "localhost", "[::1]:8000" → "[::1]"."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()


def _origins_of(host: str) -> tuple[str, str]:
    return f"http://{host}", f"https://{host}"


def _forbidden(message: str) -> ServingError:
    return ServingError(ErrorCode.FORBIDDEN, message)

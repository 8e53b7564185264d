"""Keeps web pages away from a server that asks for no key: anything in a browser on this machine can reach it."""

from litestar.datastructures import Headers

from loraserve.serving.errors import ErrorCode, ServingError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class OpenModeProtection:
    """Checks Host (DNS rebinding), Origin and Sec-Fetch-Site (foreign pages), and the body's type (HTML forms)."""

    def __init__(self, allowed_hosts: list[str], allowed_origins: list[str]) -> None:
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._allowed_origins = frozenset(allowed_origins)

    def check(self, headers: Headers, method: str) -> None:
        """Raises `ServingError`."""
        host = headers.get("host", "")
        if _without_port(host) not in self._allowed_hosts:
            raise _forbidden("The Host header names no host of this server. Start it with --allowed-hosts to add one.")
        origin = headers.get("origin")
        if origin is not None and origin not in self._allowed_origins and origin not in _origins_of(host):
            raise _forbidden("Requests from this web page's origin are not allowed.")
        if headers.get("sec-fetch-site") == "cross-site" and origin not in self._allowed_origins:
            raise _forbidden("Requests from other web sites are not allowed.")
        if method not in SAFE_METHODS and not _is_json(headers.get("content-type", "")):
            raise ServingError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "The Content-Type must be application/json.")


def _without_port(host: str) -> str:
    """ "localhost:8000" → "localhost", "[::1]:8000" → "[::1]"."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()


def _origins_of(host: str) -> tuple[str, str]:
    return f"http://{host}", f"https://{host}"


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _forbidden(message: str) -> ServingError:
    return ServingError(ErrorCode.FORBIDDEN, message)

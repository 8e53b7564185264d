"""The listening socket, bound before the model is loaded so that a taken port is known at once."""

import errno
import os
import socket
import stat
from pathlib import Path


class ListenError(Exception):
    """The address cannot be used; the message says what to change."""


def bind_tcp(host: str, port: int, *, options: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    """Bound, not listening yet: connections are refused until the server is ready. Port 0 = any free one.

    options: the names of the options for host and port, for `ListenError`.
    """
    host_option, port_option = options
    try:
        # As in URLs, an IPv6 address may have brackets.
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ListenError(f"{host_option} {host} is not an address of this machine: {error.strerror}") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ListenError(_tcp_reason(host, port, port_option, error)) from error
    return bound


def listen(bound: socket.socket, *, option: str = "--port") -> None:
    """Accept connections, which wait until the HTTP server takes them. Raises `ListenError`: an address can be bound
    several times while nothing listens there, for example by two servers that start at the same time."""
    try:
        bound.listen()
    except OSError as error:
        host, port = bound.getsockname()[:2]  # of a TCP socket: those in the file system exist only once
        raise ListenError(_tcp_reason(host, port, option, error)) from error


def _tcp_reason(host: str, port: int, port_option: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop the program that listens there or choose another {port_option}"
    if error.errno == errno.EACCES:
        return f"port {port} needs more privileges than this user has; choose a {port_option} above 1023"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def bind_unix(path: Path) -> socket.socket:
    """Like `bind_tcp`. Replaces a socket file that no process listens on."""
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _is_served(path):
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(os.fspath(path))
    except OSError as error:
        bound.close()
        reason = "it exists and is in use" if error.errno == errno.EADDRINUSE else error.strerror or error
        raise ListenError(f"cannot listen on --uds {path}: {reason}") from error
    return bound


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True


def base_url(bound: socket.socket) -> str:
    """URL of the server for clients on this machine; for a Unix socket, the URL to give curl."""
    if bound.family == socket.AF_UNIX:
        return "http://localhost"
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

"""How many files and sockets this process may have open, and how many of them are for client connections."""

import contextlib
import resource

from loraserve.cli.serve.start_error import StartError

WANTED = 65_536
WANTED_OF_MACOS = 10_240
"""Some versions of macOS allow no more, whatever the hard limit is."""
RESERVED = 128
"""For files, Redis, the engine and the processes that read uploads, so that they keep working when clients use up all
others."""
LEAST = 2 * RESERVED


def raise_limit() -> None:
    """Raises the limit as far as the system allows. Raises `StartError` if it is still too low for a server."""
    raise_soft_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST:
        raise StartError(f"only {soft} files may be open at once, but at least {LEAST} are needed: raise `ulimit -Hn`")


def raise_soft_limit() -> None:
    """Raises the limit as far as the system allows; shells often start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    for most in (WANTED, WANTED_OF_MACOS):
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        if soft < wanted:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                break


def max_connections() -> int:
    """Most client connections that may be open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft - RESERVED

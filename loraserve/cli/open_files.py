"""How many files and sockets this process may have open, and how many of them are for connections of clients."""

import contextlib
import resource

WANTED = 65_536
WANTED_OF_MACOS = 10_240
"""Some of its versions let nobody have more, whatever the hard limit says."""
RESERVED = 128
"""For files, Redis, the engine and the processes that read uploads: what runs goes on when clients take all others."""


def raise_limit() -> None:
    """As far as the system lets us: shells often start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    for most in (WANTED, WANTED_OF_MACOS):
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        if soft < wanted:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                return


def max_connections() -> int:
    """At once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else max(soft // 2, soft - RESERVED)

"""How many files and sockets this process may have open, and how many of them are for connections of clients."""

import contextlib
import resource

WANTED = 65_536
RESERVED = 128
"""For files, Redis, the engine and the processes that read uploads: what runs goes on when clients take all others."""


def raise_limit() -> None:
    """As far as the system lets us: shells often start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """At once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else max(soft // 2, soft - RESERVED)

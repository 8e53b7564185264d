"""Paths of the management API, of names as people type them."""

from urllib.parse import quote

import rich_click as click


def api_path(*parts: str | int) -> str:
    """`/v1/…` with each part as one segment, whatever is in it. Raises `click.UsageError` where it cannot be one.

    NOTE: every path that has a part from outside is made here. Written into a path as it is, `sql#old` is `sql`, and
    `../tenants/bob` no key.
    """
    return "/v1/" + "/".join(_segment(str(part)) for part in parts)


def _segment(part: str) -> str:
    # Quoted, a slash would be one again to the server, and dots to a proxy. No name has the one or is the other.
    if part in ("", ".", "..") or "/" in part:
        raise click.UsageError(f"{part!r} is no name of anything: a name is not empty, '.' or '..', and has no '/'")
    return quote(part, safe="", errors="surrogateescape")

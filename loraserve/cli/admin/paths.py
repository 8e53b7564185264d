"""Paths of the management API, built from names that users type."""

from urllib.parse import quote

import rich_click as click


def api_path(*parts: str | int) -> str:
    """`/v1/…` with each part quoted as one segment. Raises `click.UsageError` for a part that cannot be one.

    NOTE: build every path with a part from outside here. Unquoted, `sql#old` would mean `sql`, and the key id
    `../tenants/bob` another route.
    """
    return "/v1/" + "/".join(_segment(str(part)) for part in parts)


def _segment(part: str) -> str:
    # Quoting is no help: the server decodes a slash again, and a proxy dots. No name contains "/" or is "." or "..".
    if part in ("", ".", "..") or "/" in part:
        raise click.UsageError(f"{part!r} is not a valid name: names cannot be empty, '.' or '..', or contain '/'")
    return quote(part, safe="", errors="surrogateescape")

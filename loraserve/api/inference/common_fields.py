"""Checks fields that mean the same in every inference request."""

from loraserve.api.http.ranges import check_range, unsupported

MAX_SALT_CHARS = 256


def check_priority(priority: int | None) -> None:
    if priority:
        raise unsupported("priority", f"is {priority}; only 0 is supported.")


def checked_salt(cache_salt: str | None) -> str:
    if cache_salt is None:
        return ""
    check_range("cache_salt", len(cache_salt), 1, MAX_SALT_CHARS)
    return cache_salt

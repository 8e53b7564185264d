"""Limits how much of a request an error repeats: a body may be a single name or value of megabytes."""

MAX_QUOTED = 64
"""Characters of a name or value."""


def beginning(text: str, limit: int = MAX_QUOTED) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"

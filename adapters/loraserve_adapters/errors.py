"""One error for every way an adapter can be refused."""

import json

_MAX_SHOWN_CHARACTERS = 160


class AdapterError(Exception):
    """The adapter is refused. The message names the file, the key or field, what was found and what is expected.

    `code` is stable and machine-readable, e.g. "unsupported_option", "missing_tensor", "shape_mismatch".
    """

    def __init__(self, code: str, message: str, *, file: str | None = None, key: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.file = file
        self.key = key


def shown(value: object) -> str:
    """A value from a tenant's file for an error message: ASCII, on one line, of bounded length."""
    try:
        text = json.dumps(value) if not isinstance(value, str) else json.dumps(value[: _MAX_SHOWN_CHARACTERS + 1])
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    if len(text) > _MAX_SHOWN_CHARACTERS:
        return text[:_MAX_SHOWN_CHARACTERS] + "..."
    return text

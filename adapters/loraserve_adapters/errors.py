"""One error for every way an adapter can be refused."""

import json

_MAX_SHOWN_CHARACTERS = 160


class AdapterError(Exception):
    """The adapter is refused. The message names the file, the key or field, what was found and what is expected.

    `code` is stable and machine-readable, e.g. "unsupported_option", "missing_tensor", "shape_mismatch".
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        found: str | None = None,
        expected: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """key: as it is in the tenant's file. found, expected: ready to show. remedy: None = the code's usual one."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.file = file
        self.key = key
        self.found = found
        self.expected = expected
        self.remedy = remedy

    @property
    def shown_key(self) -> str | None:
        """The key as it can be shown and stored: ASCII and bounded."""
        return None if self.key is None else shown_name(self.key)


def shown(value: object) -> str:
    """A value from a tenant's file for an error message: ASCII, on one line, of bounded length."""
    try:
        text = json.dumps(value) if not isinstance(value, str) else json.dumps(value[: _MAX_SHOWN_CHARACTERS + 1])
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    if len(text) > _MAX_SHOWN_CHARACTERS:
        return text[:_MAX_SHOWN_CHARACTERS] + "..."
    return text


def shown_name(name: str) -> str:
    """A name from a tenant's file: unchanged if it is plain, else quoted and cut as by `shown`."""
    is_plain = len(name) <= _MAX_SHOWN_CHARACTERS and name.isascii() and name.isprintable() and '"' not in name
    return name if is_plain else shown(name)

"""Parses tenants' JSON: UTF-8, no duplicate keys, no NaN, bounded nesting; anything else is an `AdapterError`."""

import json
from typing import Any, NoReturn

from loraserve_adapters.errors import AdapterError, shown


def parse_object(
    data: bytes, *, file: str, code: str, max_nesting: int, max_objects: int = 1_000_000
) -> dict[str, Any]:
    """The object in `data`. code: the error's, except "duplicate_key", and "too_large" for too many objects."""
    num_objects = 0

    def refuse(reason: str, error_code: str = code, key: str | None = None) -> NoReturn:
        raise AdapterError(error_code, f"{file}: {reason}", file=file, key=key)

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_objects
        num_objects += 1
        if num_objects > max_objects:
            refuse(f"more than {max_objects} objects", "too_large")
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))
            refuse(f"the key {shown(duplicate)} occurs twice", "duplicate_key", duplicate)
        return result

    def refuse_constant(text: str) -> NoReturn:
        refuse(f"{text} is not JSON")

    if _exceeds_nesting(data, max_nesting):
        refuse(f"nested deeper than {max_nesting}")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=build, parse_constant=refuse_constant)
        # Lone surrogates ("\ud800") parse, but cannot be written out again.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        refuse(f"not valid UTF-8 JSON ({reason})")
    if not isinstance(value, dict):
        refuse("expected a JSON object")
    return value


def _exceeds_nesting(data: bytes, limit: int) -> bool:
    """Whether brackets outside strings nest deeper than `limit`, before anything is built from them."""
    if data.count(b"{") + data.count(b"[") <= limit:
        return False
    depth = 0
    # What lies between quotes that no backslash escapes is a string: every second piece.
    pieces = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    for piece in pieces[::2]:
        for byte in piece:
            if byte in b"{[":
                depth += 1
                if depth > limit:
                    return True
            elif byte in b"}]":
                depth -= 1
    return False

"""Parts of bodies that are arbitrary JSON, which is parsed once its size is known to be small."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from loraserve.serving.errors import invalid_value


def num_bytes_of(fields: Mapping[str, Raw]) -> int:
    return sum(len(name.encode()) + len(bytes(value)) for name, value in fields.items())


def parsed(param: str, fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Raises `ServingError` for values that Python cannot represent, such as 1e999."""
    try:
        return {name: msgspec.json.decode(value) for name, value in fields.items()}
    except msgspec.DecodeError as error:
        raise invalid_value(param, f"cannot be read: {error}.") from error

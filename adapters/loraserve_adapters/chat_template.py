"""Chat templates that training saved beside adapters. They are not used, because templates are programs: an adapter's
config may name one of the operator's templates, and otherwise the base's is used."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from loraserve_adapters.config_values import CONFIG_NAME
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.files import open_regular, read_exactly
from loraserve_adapters.limits import DEFAULT_LIMITS

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_NAME = "tokenizer_config.json"
MAX_BYTES = 8 << 20
"""Gemma's tokenizer_config.json, with a thousand unused tokens, takes 1 MiB."""
_LIMITS = replace(DEFAULT_LIMITS, follow_symlinks=True)


def other_chat_template(folder: Path, served: str | None) -> str | None:
    """Name of the file in the folder whose chat template may render differently from `served`, if there is one.

    None if the adapter's config names the template that it wants. For folders that the operator names. Files that
    cannot be read count as having no template.
    """
    if _fields(_read(folder, CONFIG_NAME)).get("chat_template"):
        return None
    template, name = _read(folder, TEMPLATE_NAME), TEMPLATE_NAME
    if template is None:
        template, name = _of_tokenizer(_read(folder, TOKENIZER_NAME)), TOKENIZER_NAME
    # Jinja drops one line break at the end.
    is_served = template is None or template.removesuffix("\n") == (served or "").removesuffix("\n")
    return None if is_served else name


def _of_tokenizer(config: str | None) -> str | None:
    """A tokenizer config's template; the default one of several named ones."""
    template = _fields(config).get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) else None


def _fields(config: str | None) -> dict[str, Any]:
    """Empty if it is not a JSON object."""
    try:
        fields: Any = json.loads(config or "{}")
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _read(folder: Path, name: str) -> str | None:
    try:
        with open_regular(folder, name, _LIMITS) as (descriptor, size):
            if size > MAX_BYTES:
                return None
            data = bytearray(size)
            read_exactly(descriptor, memoryview(data), 0, name)
        return data.decode("utf-8")
    except (AdapterError, UnicodeDecodeError, OSError):
        return None

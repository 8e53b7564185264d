"""Finds an adapter given to a command: a folder, or a Hugging Face name in the local cache. Never downloads."""

import os
import re
from pathlib import Path

import rich_click as click
from loraserve_adapters.config import CONFIG_NAME

_HUGGING_FACE_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class AdapterFolderType(click.Path):
    """The folder itself, or the snapshot that the local Hugging Face cache has under the name."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        found = find_adapter(str(value))
        if found is None:
            self.fail(not_found(str(value)), param, ctx)
        return found


def find_adapter(place: str) -> Path | None:
    """None if it is neither a folder nor in the cache."""
    if os.path.isdir(place):  # not pathlib: the text may be too long for a path
        return Path(place)
    return _cached(place) if is_hugging_face_name(place) else None


def is_hugging_face_name(place: str) -> bool:
    return _HUGGING_FACE_NAME.fullmatch(place) is not None


def not_found(place: str) -> str:
    if not is_hugging_face_name(place):
        return f"{place} is not a folder"
    where = f"the local Hugging Face cache: `hf download {place}` puts it there"
    return f"{place} is neither a folder nor an adapter in {where}"


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, CONFIG_NAME)
    except (OSError, ValueError):  # ValueError: not a valid repository name, such as one with two dots
        return None
    return Path(config).parent if isinstance(config, str) else None

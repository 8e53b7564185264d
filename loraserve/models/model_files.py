"""Files of a model: in its directory, or in the local Hugging Face cache."""

import json
from pathlib import Path

from transformers.utils.hub import cached_file

from loraserve.models.errors import ModelRefusedError


def find_file(model: str, name: str, revision: str | None) -> str | None:
    """The file's path, or None if there is no such file."""
    return cached_file(
        model,
        name,
        revision=revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def weight_files(model: str, revision: str | None) -> list[str]:
    """Paths of the safetensors files that transformers loads. Empty if there are none: transformers reports what is
    missing.

    Raises `ModelRefusedError`.
    """
    if (whole := find_file(model, "model.safetensors", revision)) is not None:
        return [whole]
    if (index := find_file(model, "model.safetensors.index.json", revision)) is None:
        return []
    try:
        places = json.loads(Path(index).read_bytes())["weight_map"].values()
        names = sorted({str(name) for name in places})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefusedError(f"cannot read {index}: {error!r}") from error
    files = {name: find_file(model, name, revision) for name in names}
    if missing := [name for name, path in files.items() if path is None]:
        raise ModelRefusedError(f"{model} lacks {missing[0]}, which its index names")
    return [path for path in files.values() if path is not None]

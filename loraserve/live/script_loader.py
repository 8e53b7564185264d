"""The Lua scripts, read from the package."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(slots=True, frozen=True)
class Script:
    source: str
    sha1: str
    """The name for EVALSHA."""


def load_script(name: str, shared: str | None = None) -> Script:
    """shared: name of a file of functions to prepend."""
    folder = files("loraserve.live").joinpath("scripts")
    names = [name] if shared is None else [shared, name]
    source = "\n".join(folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in names)
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())

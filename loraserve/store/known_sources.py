"""What adapter folders of the command line held when a server read them last, so that a restart need not do it again.

`sources-<what they were read as>.json`. A hint: whatever is wrong with it, folders are read.
"""

import hashlib
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from loraserve_adapters.config import CONFIG_NAME
from loraserve_adapters.file_state import FileState, file_state
from loraserve_adapters.safetensors_file import WEIGHTS_NAME

from loraserve.store.durable import replace_file

States = tuple[FileState, FileState]
"""Of config and weights."""


class KnownSource(msgspec.Struct, frozen=True):
    states: States
    digest: str


class KnownSources:
    """Threads may use it; two servers of one data directory and base model lose each other's at worst."""

    def __init__(self, data_dir: Path, read_as: str) -> None:
        """read_as: all that decides, besides its files, whether a folder is accepted and what its digest is."""
        self._path = data_dir / f"sources-{hashlib.sha256(read_as.encode()).hexdigest()[:16]}.json"
        self._lock = threading.Lock()
        self._found: dict[str, KnownSource] = {}
        self._before = self._load()

    def digest(self, folder: Path) -> str | None:
        """Of its content, if its files are the very ones that were read."""
        name = _name(folder)
        known = self._found.get(name) or self._before.get(name)
        if known is None or known.states != states_of(folder):
            return None
        self._add(folder, known)
        return known.digest

    def begin(self, folder: Path) -> States | None:
        """Call before it is read. None where a change could go unseen, so that it is not to be remembered."""
        now_ns = time.time_ns()
        states = states_of(folder)
        return states if states is not None and all(state.was_settled(now_ns) for state in states) else None

    def remember(self, folder: Path, states: States, digest: str) -> None:
        """states: from before it was read."""
        self._add(folder, KnownSource(states, digest))

    def save(self) -> None:
        """What was asked for or remembered; nothing else. Raises `OSError`."""
        with self._lock:
            if self._found != self._before:
                replace_file(self._path, msgspec.json.encode(self._found))

    def _add(self, folder: Path, source: KnownSource) -> None:
        with self._lock:
            self._found[_name(folder)] = source

    def _load(self) -> dict[str, KnownSource]:
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, KnownSource])
        return {}


def _name(folder: Path) -> str:
    return str(folder.absolute())


def states_of(folder: Path) -> States | None:
    """None where it lacks one of the files."""
    config, weights = file_state(folder / CONFIG_NAME), file_state(folder / WEIGHTS_NAME)
    return None if config is None or weights is None else (config, weights)

"""Digests of the adapter folders given on the command line, so that a restart need not read unchanged ones again.

Kept in `sources-<hash of read_as>.json`, as long as the folders exist: a start need not be given them all. It is only a
hint: if anything is wrong with it, the folders are read.
"""

import hashlib
import os
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
"""States of config and weights."""


class KnownSource(msgspec.Struct, frozen=True):
    states: States
    digest: str


class KnownSources:
    """Thread-safe. Two servers with the same data directory and base model at worst overwrite each other's entries."""

    def __init__(self, data_dir: Path, read_as: str) -> None:
        """read_as: everything except its files that determines whether a folder is accepted, and its digest."""
        self._path = data_dir / f"sources-{hashlib.sha256(read_as.encode()).hexdigest()[:16]}.json"
        self._lock = threading.Lock()
        self._sources = self._load()
        """By folder."""
        self._is_saved = True

    def digest(self, folder: Path) -> str | None:
        """Digest of the folder's content, if its files are unchanged since they were read."""
        known = self._sources.get(_name(folder))
        return None if known is None or known.states != states_of(folder) else known.digest

    def begin(self, folder: Path) -> States | None:
        """Call before reading the folder. None if a change could go unnoticed: then do not call `remember`."""
        now_ns = time.time_ns()
        states = states_of(folder)
        return states if states is not None and all(state.was_settled(now_ns) for state in states) else None

    def remember(self, folder: Path, states: States, digest: str) -> None:
        """states: as `begin` returned them."""
        with self._lock:
            self._sources[_name(folder)] = KnownSource(states, digest)
            self._is_saved = False

    def save(self) -> None:
        """Writes what was added, without entries of folders that are gone. Raises `OSError`."""
        with self._lock:
            if not self._is_saved:
                self._sources = {name: known for name, known in self._sources.items() if os.path.isdir(name)}
                replace_file(self._path, msgspec.json.encode(self._sources))
                self._is_saved = True

    def _load(self) -> dict[str, KnownSource]:
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, KnownSource])
        return {}


def _name(folder: Path) -> str:
    return str(folder.absolute())


def states_of(folder: Path) -> States | None:
    """None if one of the files is missing."""
    config, weights = file_state(folder / CONFIG_NAME), file_state(folder / WEIGHTS_NAME)
    return None if config is None or weights is None else (config, weights)

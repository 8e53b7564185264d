"""Digests of the adapter folders given on the command line, so that a restart need not read unchanged ones again.

Kept in `sources-<hash of read_as>.json`. It is only a hint: if anything is wrong with it, the folders are read.
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
        self._found: dict[str, KnownSource] = {}
        self._before = self._load()

    def digest(self, folder: Path) -> str | None:
        """Digest of the folder's content, if its files are unchanged since they were read."""
        name = _name(folder)
        known = self._found.get(name) or self._before.get(name)
        if known is None or known.states != states_of(folder):
            return None
        self._add(folder, known)
        return known.digest

    def begin(self, folder: Path) -> States | None:
        """Call before reading the folder. None if a change could go unnoticed: then do not call `remember`."""
        now_ns = time.time_ns()
        states = states_of(folder)
        return states if states is not None and all(state.was_settled(now_ns) for state in states) else None

    def remember(self, folder: Path, states: States, digest: str) -> None:
        """states: as `begin` returned them."""
        self._add(folder, KnownSource(states, digest))

    def save(self) -> None:
        """Keeps only entries that `digest` found or `remember` added since the start. Raises `OSError`."""
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
    """None if one of the files is missing."""
    config, weights = file_state(folder / CONFIG_NAME), file_state(folder / WEIGHTS_NAME)
    return None if config is None or weights is None else (config, weights)

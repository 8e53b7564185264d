"""What was used, one line a finished request: the truth that counters are added up from. Never a prompt or an answer.

`usage/<yyyymmdd>/<process>.jsonl`, days of UTC. A process appends to its own files, and nobody
ever changes a byte of them.
"""

import os
import re
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import msgspec
from loraserve_adapters.sync_file import sync_file, sync_folder

from loraserve.store.durable import data_folder, make_folder, write_all
from loraserve.store.errors import InvalidNameError

PROCESS_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
LOG_SUFFIX = ".jsonl"


class Outcome(StrEnum):
    """How an admitted request ended; the tokens it was given are billed in every case."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    """By the client, an operator or a revocation."""
    ERROR = "error"


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    at: float
    """Unix time of the end; decides the day and the hour."""
    tenant: str
    key_id: str | None
    """None in open mode."""
    adapter: str | None
    """None for the base model, as the next three."""
    adapter_tenant: str | None = None
    """Its owner: the tenant itself or `shared`."""
    version: int | None
    digest: str | None
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's."""
    output_tokens: int
    outcome: Outcome
    ttft_ms: float | None
    """None when there was no token."""
    duration_ms: float


class UsageLog:
    """The lines of this process. `append` and `sync` may be called from two different threads."""

    def __init__(self, data_dir: Path, process: str) -> None:
        """process: unique among processes and starts, 1 to 64 of a-z, 0-9 and `-`; else raises `InvalidNameError`."""
        if not PROCESS_NAME.fullmatch(process):
            raise InvalidNameError(f"a process cannot be named {process[:80]!a}: use 1 to 64 of a-z, 0-9 and '-'")
        self._folder = data_folder(data_dir, "usage")
        self._process = process
        self._encoder = msgspec.json.Encoder()
        self._day = ""
        self._descriptor = -1
        self._size = 0
        self._dirty = False
        self._finished: list[int] = []
        """Files of earlier days, not yet synced and closed."""

    def append(self, line: UsageLine) -> None:
        """Readable by everybody when this returns; survives a crash of the machine after the next `sync`.

        Raises `OSError`, such as for a full disk, with the file as it was before.
        """
        day = datetime.fromtimestamp(line.at, UTC).strftime("%Y%m%d")
        if day != self._day:
            self._open(day)
        data = self._encoder.encode(line) + b"\n"
        try:
            write_all(self._descriptor, data)
        except BaseException:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        self._dirty = True

    def sync(self) -> None:
        """To be called each second. After an `OSError` what was appended since the last call may be lost."""
        finished, self._finished = self._finished, []
        for descriptor in finished:
            try:
                sync_file(descriptor)
            finally:
                os.close(descriptor)
        if self._dirty:
            self._dirty = False
            sync_file(self._descriptor)  # Of the new day, if `append` has just turned the page.

    def close(self) -> None:
        """Everything synced. Nothing may be appended afterwards."""
        self.sync()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._day = -1, ""

    def _open(self, day: str) -> None:
        make_folder(self._folder / day)
        path = self._folder / day / f"{self._process}{LOG_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            sync_folder(path.parent)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                write_all(descriptor, b"\n")
                size += 1
        except BaseException:
            os.close(descriptor)
            raise
        finished, self._descriptor, self._day, self._size = self._descriptor, descriptor, day, size
        if finished >= 0:
            self._finished.append(finished)

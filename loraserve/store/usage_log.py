"""The usage log, one line per finished request: the source of all usage counters. Never a prompt or an answer.

`usage/<yyyymmdd>/<process>.jsonl`, with UTC days. A process appends only to its own files, and written bytes never
change.
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


class BilledOutcome(StrEnum):
    """How an admitted request ended; its tokens are billed in every case."""

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
    """None for the base model, like the next three fields."""
    adapter_tenant: str | None = None
    """The adapter's owner: the tenant itself or `shared`."""
    version: int | None
    digest: str | None
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    output_tokens: int
    outcome: BilledOutcome
    ttft_ms: float | None
    """None if there was no token."""
    duration_ms: float


class UsageLog:
    """The log of this process. `append` and `sync` may be called from two different threads."""

    def __init__(self, data_dir: Path, process: str) -> None:
        """process: unique across processes and restarts; 1 to 64 of a-z, 0-9, `-`, else raises `InvalidNameError`."""
        if not PROCESS_NAME.fullmatch(process):
            raise InvalidNameError(
                f"a process cannot be named {process[:80]!a}: use 1 to 64 characters from a-z, 0-9 and '-'"
            )
        self._folder = data_folder(data_dir, "usage")
        self._process = process
        self._encoder = msgspec.json.Encoder()
        self._day = ""
        self._descriptor = -1
        self._size = 0
        self._dirty = False
        self._finished: list[int] = []
        """Descriptors of earlier days' files, not yet synced and closed."""

    def append(self, line: UsageLine) -> None:
        """When this returns, other processes can read the line; after the next `sync` it survives a machine crash.

        Raises `OSError`, for example if the disk is full, and then leaves the file unchanged.
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
        """Call it every second. After an `OSError`, lines appended since the last call may be lost."""
        finished, self._finished = self._finished, []
        for descriptor in finished:
            try:
                sync_file(descriptor)
            finally:
                os.close(descriptor)
        if self._dirty:
            self._dirty = False
            sync_file(self._descriptor)  # The new day's file, if `append` has just switched to it.

    def close(self) -> None:
        """Syncs everything. Do not append afterwards."""
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

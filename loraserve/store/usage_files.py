"""Reading the usage logs of all processes, and their retention."""

import os
import re
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from loraserve.store.durable import data_folder, remove_folder
from loraserve.store.usage_log import LOG_SUFFIX, PROCESS_NAME, UsageLine

KEEP_DAYS = 400
READ_BYTES = 1024 * 1024

_DAY = re.compile(r"[0-9]{8}")


class LogFile(msgspec.Struct, frozen=True, kw_only=True):
    day: str
    """yyyymmdd"""
    process: str
    path: Path
    size_bytes: int

    @property
    def name(self) -> str:
        """`yyyymmdd/process`, unique and without a path."""
        return f"{self.day}/{self.process}"


class ReadLines(msgspec.Struct, frozen=True, kw_only=True):
    lines: list[UsageLine]
    next_offset: int
    """Offset to continue at; unchanged if no complete line follows."""
    num_damaged: int
    """Complete lines that were skipped because they are not a `UsageLine`."""


def read_lines(path: Path, offset: int, max_bytes: int = READ_BYTES) -> ReadLines:
    """The complete lines from a byte offset on, about `max_bytes`; leaves a torn or unfinished last line for later.

    Raises `FileNotFoundError` for a log that retention removed.
    """
    decoder = msgspec.json.Decoder(UsageLine)
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(max_bytes)
        if b"\n" not in data:
            data += file.readline()
    data = data[: data.rfind(b"\n") + 1]
    lines: list[UsageLine] = []
    num_damaged = 0
    for line in data.split(b"\n")[:-1]:
        try:
            lines.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            num_damaged += 1
    return ReadLines(lines=lines, next_offset=offset + len(data), num_damaged=num_damaged)


def list_logs(data_dir: Path, since_day: str | None = None) -> list[LogFile]:
    """Newest day first; within a day by process. since_day: yyyymmdd; None = all days."""
    folder = data_folder(data_dir, "usage")
    logs = [
        LogFile(day=day, process=path.stem, path=path, size_bytes=path.stat().st_size)
        for day in _days(folder)
        if since_day is None or day >= since_day
        for path in (folder / day).glob(f"*{LOG_SUFFIX}")
        if PROCESS_NAME.fullmatch(path.stem)
    ]
    logs.sort(key=lambda log: log.process)
    logs.sort(key=lambda log: log.day, reverse=True)
    return logs


def remove_old_logs(data_dir: Path, today: str, keep_days: int = KEEP_DAYS) -> list[str]:
    """Removes days before the last `keep_days`, which include today (yyyymmdd, UTC); returns the removed days."""
    folder = data_folder(data_dir, "usage")
    first = datetime.strptime(today, "%Y%m%d") - timedelta(days=keep_days - 1)
    doomed = [day for day in _days(folder) if day < first.strftime("%Y%m%d")]
    for day in doomed:
        remove_folder(folder / day)
    return doomed


def _days(folder: Path) -> list[str]:
    return sorted(filter(_DAY.fullmatch, os.listdir(folder)))

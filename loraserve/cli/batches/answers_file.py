"""The file of answers, which outlives an interrupted batch: a line for each, whole as soon as it is there."""

import fcntl
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import rich_click as click

from loraserve.cli.batches.batch_answer import BatchAnswer


@dataclass(frozen=True, slots=True)
class AnswersFile:
    path: Path
    file: BinaryIO
    answered: frozenset[str]
    """By an earlier run: their custom_ids."""

    def add(self, answer: BatchAnswer) -> None:
        """It is with the operating system when this returns. Raises `click.ClickException`."""
        try:
            self.file.write(msgspec.json.encode(answer) + b"\n")
            self.file.flush()
        except OSError as error:
            raise click.ClickException(f"{self.path}: {error.strerror}") from error


@contextmanager
def open_answers(path: Path, custom_ids: Collection[str], *, resume: bool) -> Iterator[AnswersFile]:
    """custom_ids: those that may be answered. resume: what was answered is kept; failures, and a line that was not
    written to its end, are not.

    Raises `click.ClickException` if the file cannot be used, or is in use.
    """
    try:
        answered = _keep_answered(path, custom_ids) if resume and path.exists() else frozenset[str]()
        file = path.open("ab" if resume else "xb")
    except FileExistsError:
        raise click.ClickException(f"{path} exists: go on with it by --resume, or name another") from None
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    with file:
        _lock(file, path)
        yield AnswersFile(path, file, answered)


def _keep_answered(path: Path, custom_ids: Collection[str]) -> frozenset[str]:
    answered: set[str] = set()
    with path.open("rb") as file, tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as kept:
        try:
            _lock(file, path)
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n") and (custom_id := _answered(path, number, line, custom_ids)) is not None:
                    answered.add(custom_id)
                    kept.write(line)
            kept.flush()
            os.fchmod(kept.fileno(), os.fstat(file.fileno()).st_mode)
            os.replace(kept.name, path)
        except BaseException:
            os.unlink(kept.name)
            raise
    return frozenset(answered)


def _answered(path: Path, number: int, line: bytes, custom_ids: Collection[str]) -> str | None:
    """Its custom_id, unless it failed."""
    try:
        answer = msgspec.json.decode(line, type=BatchAnswer)
    except msgspec.DecodeError as error:
        raise click.ClickException(f"{path}, line {number} is no answer: {error}") from error
    if answer.custom_id not in custom_ids:
        raise click.ClickException(f"{path}, line {number} answers {answer.custom_id!r}, which is not asked")
    return answer.custom_id if answer.failure is None else None


def _lock(file: BinaryIO, path: Path) -> None:
    """Until it is closed."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise click.ClickException(f"{path} is written by another process") from None

"""The answers file, which survives an interrupted batch: each answer is written as a whole line when it arrives."""

import fcntl
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

import msgspec
import rich_click as click

from loraserve.cli.batches.batch_answer import BatchAnswer


@dataclass(frozen=True, slots=True)
class AnswersFile:
    path: Path
    file: FileIO
    """Unbuffered: a buffer would be written again after a failure."""
    answered: frozenset[str] = frozenset()
    """custom_ids that an earlier run answered."""

    def add(self, answer: BatchAnswer) -> None:
        """The answer is with the operating system when this returns. Raises `click.ClickException`."""
        line = memoryview(msgspec.json.encode(answer) + b"\n")
        try:
            while line:
                line = line[self.file.write(line) :]
        except OSError as error:
            raise click.ClickException(f"{self.path}: {error.strerror}") from error


@contextmanager
def open_answers(path: Path, custom_ids: Collection[str], *, resume: bool) -> Iterator[AnswersFile]:
    """custom_ids: those of the requests. resume: keeps answers, but not failures nor an incomplete last line.

    Raises `click.ClickException` if the file cannot be used, or is in use.
    """
    opening = _resume(path, custom_ids) if resume and path.exists() else _begin(path)
    with opening as opened:
        yield opened


@contextmanager
def _begin(path: Path) -> Iterator[AnswersFile]:
    if path.exists():
        _check_regular(path)
        raise click.ClickException(f"{path} exists: continue it with --resume, or name another file")
    with _as_command_error(path):
        file = FileIO(path.resolve(), "x")
    with file:
        _lock(file, path)
        yield AnswersFile(path, file)


@contextmanager
def _resume(path: Path, custom_ids: Collection[str]) -> Iterator[AnswersFile]:
    """Replaces the file by a new one with the kept answers. The old one stays locked, for processes that opened it."""
    _check_regular(path)
    place = path.resolve()  # a symbolic link is kept
    with _as_command_error(path):
        old = place.open("rb")
    with old:
        _lock(old, path)
        if not os.path.samestat(os.fstat(old.fileno()), place.stat()):
            raise click.ClickException(f"{path} was just replaced by another process")
        with _as_command_error(path):
            descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        with FileIO(descriptor, "w") as file:
            try:
                _lock(file, path)
                answers = AnswersFile(path, file, _copy_answered(old, file, path, custom_ids))
                with _as_command_error(path):
                    os.fchmod(descriptor, os.fstat(old.fileno()).st_mode)
                    os.fsync(descriptor)
                    os.replace(name, place)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(name)
                raise
            yield answers


def _check_regular(path: Path) -> None:
    if not path.is_file():
        raise click.ClickException(f"{path} is not a regular file")


def _copy_answered(old: IO[bytes], new: FileIO, path: Path, custom_ids: Collection[str]) -> frozenset[str]:
    answered: set[str] = set()
    with _as_command_error(path), open(new.fileno(), "wb", closefd=False) as buffered:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                break
            answer = _answer_of(line, f"{path}, line {number}", custom_ids)
            if answer.failure is None and answer.custom_id not in answered:
                answered.add(answer.custom_id)
                buffered.write(line)
    return frozenset(answered)


def _answer_of(line: bytes, place: str, custom_ids: Collection[str]) -> BatchAnswer:
    try:
        answer = msgspec.json.decode(line, type=BatchAnswer)
    except (ValueError, RecursionError) as error:
        raise click.ClickException(f"{place} is not an answer: {error}") from error
    if answer.custom_id not in custom_ids:
        raise click.ClickException(f"{place} answers {answer.custom_id!r}, which is not in the requests file")
    return answer


def _lock(file: IO[bytes] | FileIO, path: Path) -> None:
    """Locks the file until it is closed."""
    try:
        with _as_command_error(path):
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise click.ClickException(f"{path} is in use by another process") from None


@contextmanager
def _as_command_error(path: Path) -> Iterator[None]:
    """Turns `OSError` into an error of the command, except `BlockingIOError`: another process has the lock."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error

"""Standard streams of a process that goes on where nobody can take them: closed, a full disk, a reader that is gone."""

import contextlib
import io
import os
import sys
from typing import TextIO, cast


class _Unfailing(io.FileIO):
    """What cannot be written is lost, so that nothing of it waits in a buffer for the interpreter's last flush."""

    # The type that `FileIO` has for it is Python's own.
    def write(self, data, /) -> int | None:  # pyright: ignore[reportMissingParameterType]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def open_closed() -> None:
    """They lead nowhere. Else sockets and files get their numbers, and uvloop aborts the process over one it closes."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def never_fail() -> None:
    """Print, rich and logging never see an error of stdout and stderr from here on. Call it before they take them."""
    sys.stdout = _unfailing(sys.stdout)
    sys.stderr = _unfailing(sys.stderr)


def _unfailing(stream: TextIO) -> TextIO:
    """The same file; streams without one stay what they are."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _Unfailing(stream.fileno(), "w", closefd=False)
    return cast(
        TextIO,
        io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),  # as Python, with and without -u
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        ),
    )

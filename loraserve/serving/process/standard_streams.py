"""Standard streams of a process that goes on where nobody takes them: closed, a full disk, a reader gone or asleep."""

import contextlib
import io
import os
import select
import sys
from typing import TextIO, cast

PATIENCE_S = 0.1
"""How long a reader may be behind before what it does not take is lost; then nothing waits until it reads again."""


class _Unfailing(io.FileIO):
    """What cannot be written is lost, so that nothing of it waits in a buffer for the interpreter's last flush, nor the
    event loop for whoever should read it."""

    _patience_s = PATIENCE_S

    # The type that `FileIO` has for it is Python's own.
    def write(self, data, /) -> int | None:  # pyright: ignore[reportMissingParameterType]
        view = memoryview(data)
        with contextlib.suppress(OSError):
            for begin in range(0, len(view), select.PIPE_BUF):
                if not self._has_room():
                    break
                super().write(view[begin : begin + select.PIPE_BUF])
        return len(view)

    def _has_room(self) -> bool:
        """For PIPE_BUF bytes without waiting."""
        _, ready, _ = select.select([], [self], [], self._patience_s)
        self._patience_s = PATIENCE_S if ready else 0.0
        return bool(ready)


def open_closed() -> None:
    """They lead nowhere. Else sockets and files get their numbers, and uvloop aborts the process over one it closes."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def never_fail() -> None:
    """Print, rich and logging never see an error of stdout and stderr from here on, nor wait for them. Call it before
    they take them."""
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

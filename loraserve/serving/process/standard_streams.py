"""Standard streams for a process that must go on if they cannot be written: closed, disk full, reader gone or hung."""

import contextlib
import io
import os
import select
import sys
from typing import TextIO, cast

PATIENCE_S = 0.1
"""How long to wait for a slow reader before output is dropped; from then on nothing waits until it reads again."""


class _Unfailing(io.FileIO):
    """Drops what cannot be written, so that nothing stays in a buffer for the interpreter's final flush, and the event
    loop never waits for a reader."""

    _patience_s = PATIENCE_S

    # The type of `data` in `FileIO` is private to Python's type stubs.
    def write(self, data, /) -> int | None:  # pyright: ignore[reportMissingParameterType]
        view = memoryview(data)
        with contextlib.suppress(OSError):
            for begin in range(0, len(view), select.PIPE_BUF):
                if not self._has_room():
                    break
                super().write(view[begin : begin + select.PIPE_BUF])
        return len(view)

    def _has_room(self) -> bool:
        """Whether PIPE_BUF bytes can be written without blocking; waits for that up to `_patience_s`."""
        _, ready, _ = select.select([], [self], [], self._patience_s)
        self._patience_s = PATIENCE_S if ready else 0.0
        return bool(ready)


def open_closed() -> None:
    """Opens closed standard streams on the null device. Otherwise sockets and files would get their descriptors, and
    uvloop aborts the process when it closes such a one."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Gets the lowest free descriptor.
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def never_fail() -> None:
    """From here on print, rich and logging get no errors from stdout and stderr and never wait for them. Call it before
    they start using the streams."""
    sys.stdout = _unfailing(sys.stdout)
    sys.stderr = _unfailing(sys.stderr)


def _unfailing(stream: TextIO) -> TextIO:
    """Wraps the same file; streams without a file are returned as they are."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _Unfailing(stream.fileno(), "w", closefd=False)
    return cast(
        TextIO,
        io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),  # As Python does with and without -u.
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        ),
    )

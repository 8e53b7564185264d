"""Standard streams that whoever started us has closed (`loraserve serve >&-`)."""

import os
import sys


def open_closed_streams() -> None:
    """They lead nowhere. Else sockets and files get their numbers, and uvloop aborts the process over one it closes."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, open(number, mode))

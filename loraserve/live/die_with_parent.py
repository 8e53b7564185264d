"""`python die_with_parent.py PARENT_PID PROGRAM ARGS…` becomes PROGRAM, which gets SIGTERM when PARENT_PID ends.

stdin: the end of a pipe whose other end PARENT_PID alone has. Run by its path, so that it imports nothing of loraserve.
"""

import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""


def fork_watcher() -> None:
    """A child that ends us when stdin is closed, whatever we have become by then, and ends with us."""
    ended, held = os.pipe()
    os.set_inheritable(held, True)
    program = os.getpid()
    if os.fork() == 0:
        os.close(held)
        _watch(program, ended)
        os._exit(0)
    os.close(ended)


def _watch(program: int, ended: int) -> None:
    """ended: readable once nobody has what only the program and its children were given."""
    readable, _, _ = select.select([sys.stdin.fileno(), ended], [], [])
    for number in (signal.SIGTERM, signal.SIGKILL):
        # NOTE: once the program is gone we are another's child, and its number may be another's too.
        if ended in readable or os.getppid() != program:
            return
        os.kill(program, number)
        readable, _, _ = select.select([ended], [], [], GRACE_S)


if __name__ == "__main__":
    parent, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        # NOTE: the signal comes when the parent's *thread* that started us ends; it outlives the exec below.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    else:
        fork_watcher()
    if os.getppid() == parent:
        os.execv(program, sys.argv[2:])

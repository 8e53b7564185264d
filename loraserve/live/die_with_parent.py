"""`python die_with_parent.py PARENT_PID PROGRAM ARGS…` becomes PROGRAM, which gets SIGTERM when PARENT_PID ends.

stdin: a pipe whose other end only PARENT_PID has. Run it by its path, so that it imports nothing from loraserve.
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
    """Forks a child that ends this process, whatever program it is by then, when stdin closes, and exits with it."""
    ended, held = os.pipe()
    os.set_inheritable(held, True)
    program = os.getpid()
    if os.fork() == 0:
        os.close(held)
        _watch(program, ended)
        os._exit(0)
    os.close(ended)


def _watch(program: int, ended: int) -> None:
    """ended: becomes readable when the program and all its children are gone: only they have the other end."""
    readable, _, _ = select.select([sys.stdin.fileno(), ended], [], [])
    for number in (signal.SIGTERM, signal.SIGKILL):
        # NOTE: once the program is gone, this process has another parent, and the program's pid may be reused.
        if ended in readable or os.getppid() != program:
            return
        os.kill(program, number)
        readable, _, _ = select.select([ended], [], [], GRACE_S)


if __name__ == "__main__":
    parent, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        # NOTE: the signal is sent when the parent's *thread* that started us ends; the setting survives the exec below.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    else:
        fork_watcher()
    if os.getppid() == parent:
        os.execv(program, sys.argv[2:])

"""`python die_with_parent.py PARENT_PID PROGRAM ARGS…` becomes PROGRAM, which gets SIGTERM when PARENT_PID ends.

Run by its path, so that it imports nothing of loraserve.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        # NOTE: the signal comes when the parent's *thread* that started us ends; it outlives the exec below.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == parent:
        os.execv(program, sys.argv[2:])

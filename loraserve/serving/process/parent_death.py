"""Ends our child processes together with their parent."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """NOTE: Linux sends the signal when the parent's *thread* that started us ends, so start us from a long-lived one.

    On other systems, or if the parent is already gone, it has no effect: a process that reads from a socket then ends
    when the socket closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

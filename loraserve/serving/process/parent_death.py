"""Processes of ours end with the one that started them."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """NOTE: Linux sends the signal when the parent's *thread* that started us ends, so start us from a lasting one.

    Elsewhere, and if the parent is gone already, nothing happens: who reads from a socket ends when it is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

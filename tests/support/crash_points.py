"""Kills a piece of work at each change that it makes to the file system, one after the other."""

import itertools
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_CHANGES = [
    "fdatasync",
    "fsync",
    "ftruncate",
    "link",
    "mkdir",
    "pwrite",
    "rename",
    "replace",
    "rmdir",
    "unlink",
    "utime",
    "write",
]
_KILLED = -signal.SIGKILL
_FAILED = 1


def crash_points(prepare: Callable[[], None], work: Callable[[], None]) -> Iterator[int]:
    """Yields after each crash, with the disk as the dead process left it. Ends when `work` runs to its end.

    Each round runs `prepare` here and then `work` in a child that is killed, without any clean-up, before its first,
    second, … change. A write is killed halfway through its bytes. Unlike a power cut, a kill loses no unsynced data:
    the order of syncs is for other tests.
    """
    for num_changes in itertools.count():
        prepare()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # About a fork with threads: the child uses none.
            child = os.fork()
        if child == 0:
            _work_and_die(work, num_changes)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, _KILLED), "the work failed by itself: see above"
        if status == 0:
            return
        yield num_changes


def _work_and_die(work: Callable[[], None], num_changes: int) -> None:
    try:
        die_at_change(num_changes)
        work()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(_FAILED)
    os._exit(0)


def die_at_change(num_changes: int) -> None:
    """From now on this process makes `num_changes` changes, and is killed before or halfway through the next one."""
    left = itertools.count(num_changes, -1)
    for name in _CHANGES:
        setattr(os, name, _killing(name, getattr(os, name), left))


def _killing(name: str, change: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(left) == 0:
            if name in ("write", "pwrite"):
                descriptor, data, *position = args
                change(descriptor, memoryview(data)[: len(data) // 2], *position)
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*args, **kwargs)

    return wrapped

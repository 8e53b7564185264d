"""Locks between processes and threads, held through an open file: they are released when their process dies."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RETRY_S = 0.0005


def lock(path: Path, *, shared: bool = False) -> int:
    """Waits for the lock; returns a descriptor that holds it until closed. Not reentrant."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def try_lock(path: Path, within_s: float = 0.0) -> int | None:
    """None if the lock is held elsewhere during all of `within_s`."""
    descriptor = _open(path)
    until_s = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                os.close(descriptor)
                return None
            time.sleep(RETRY_S)
        else:
            return descriptor


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    descriptor = lock(path, shared=shared)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def try_locked(path: Path, within_s: float = 0.0) -> Iterator[bool]:
    """Yields whether the lock is ours."""
    descriptor = try_lock(path, within_s)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

"""A process that forks another for every job, so that what jobs import is imported only once.

Measured: importing the modules that read an adapter takes 150 ms of a core; forking a process that has imported them
takes 2 ms.
"""

import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

NUM_SOCKETS = 3
"""Sent for each job: one for its stdin and stdout, one for its stderr, one for its life. See `ForkedJobs`."""
RECEIVED = b"1"
"""Sent back once the sockets have been received."""


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    life: socket.socket
    end: int
    """Of a pipe to which nobody writes: becomes readable when the child, which has the other end, is gone."""


def serve(main: Callable[[], int]) -> None:
    """Forks for the process at the other end of stdin, a socket, until it is closed; then ends all children.

    main: what a child does, with the sockets of its job; returns its exit status.
    """
    gc.collect()
    gc.freeze()
    children: set[_Child] = set()
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as control, selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in selector.select():
                    child: _Child | None = key.data
                    if child is None:
                        child = _start(control, main)
                        if child is None:
                            return
                        children.add(child)
                        selector.register(child.life, selectors.EVENT_READ, child)
                        selector.register(child.end, selectors.EVENT_READ, child)
                    elif child not in children:
                        pass  # it ended in this same round
                    elif key.fileobj is child.life:
                        selector.unregister(child.life)
                        os.kill(child.pid, signal.SIGKILL)
                    else:
                        children.remove(child)
                        selector.unregister(child.end)
                        with suppress(KeyError):
                            selector.unregister(child.life)
                        _report(child)
        finally:
            for child in children:
                os.kill(child.pid, signal.SIGKILL)


def _start(control: socket.socket, main: Callable[[], int]) -> _Child | None:
    """None if the other end was closed."""
    message, descriptors, _, _ = socket.recv_fds(control, 1, NUM_SOCKETS)
    if not message:
        return None
    with suppress(ConnectionError):  # the other end is gone: the next read of `control` shows it
        control.sendall(RECEIVED)
    job, errors, life = descriptors
    end, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(main, job, errors, held)
    for descriptor in (job, errors, held):
        os.close(descriptor)
    return _Child(pid, socket.socket(fileno=life), end)


def _become(main: Callable[[], int], job: int, errors: int, held: int) -> NoReturn:
    status = 1
    try:
        for descriptor, place in ((job, 0), (job, 1), (errors, 2), (held, 3)):
            os.dup2(descriptor, place)
        _close_from(4)
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _close_from(first: int) -> None:
    """Closes all descriptors from that one on."""
    if sys.platform == "darwin":
        # Its `closerange` calls `close` for every possible number. On Linux it is one call: 3 µs; this way, 16 µs.
        with suppress(OSError):
            for name in os.listdir("/dev/fd"):
                if int(name) >= first:
                    with suppress(OSError):  # the one that the names were read from
                        os.close(int(name))
            return
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _report(child: _Child) -> None:
    _, status = os.waitpid(child.pid, 0)
    with suppress(OSError):
        child.life.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    child.life.close()
    os.close(child.end)

"""Threads that run only on demand, so that everything that depends on them is the same in every run."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import pytest

from loraserve.engine.adapters import host_tier, transit, upload


class ManualFuture(Future[Any]):
    def __init__(self, threads: "ManualThreads") -> None:
        super().__init__()
        self.threads = threads


class ManualThreads:
    """A `ThreadPoolExecutor` of one thread. Submitted calls run when they are waited for, or one by one."""

    def __init__(self, *_: object) -> None:
        self._queued: deque[tuple[ManualFuture, Callable[[], object]]] = deque()

    def submit(self, call: Callable[[], object]) -> ManualFuture:
        future = ManualFuture(self)
        self._queued.append((future, call))
        return future

    def run_next(self) -> None:
        """A no-op if nothing is queued."""
        if self._queued:
            future, call = self._queued.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)


def wait(futures: Iterable[ManualFuture], timeout: float | None = None) -> None:
    for future in futures:
        while not future.done():
            future.threads.run_next()


def use_manual_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the threads that bring adapters to a device."""
    monkeypatch.setattr(upload, "ThreadPoolExecutor", ManualThreads)
    for module in (transit, host_tier):
        monkeypatch.setattr(module, "wait", wait)

"""Which request of a batch is sent next, how many run at a time, and when one is given up."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import uniform

from loraserve.cli.batches.batch_answer import BatchAnswer
from loraserve.cli.batches.batch_requests import BatchRequest
from loraserve.cli.batches.sender import NO_KEY, REFUSED, Attempt

FIRST_PAUSE_S = 0.5
"""Doubled each time, where the server does not say how long."""
MAX_PAUSE_S = 8.0
GROW_AFTER = 16
"""Answers without a refusal, after which one more runs at a time, as long as there were more."""


@dataclass(slots=True)
class _Waiting:
    request: BatchRequest
    num_failures: int = 0
    failed_since_s: float = 0.0
    """Its first failure."""


class Dispatch:
    """What may be answered later is sent again, before anything new.

    A server that refuses with 429 gets one request fewer at a time, so that none is refused again and again while
    others take its place.
    """

    def __init__(
        self,
        send: Callable[[BatchRequest], Awaitable[Attempt]],
        requests: Iterator[BatchRequest],
        on_answer: Callable[[BatchAnswer], None],
        *,
        concurrency: int,
        retry_for_s: float,
    ) -> None:
        """on_answer: gets each once, also those of requests that were given up."""
        self.stopped_by: BatchAnswer | None = None
        """After which nothing new was sent, as it would have met the same."""
        self._send = send
        self._requests = requests
        self._again: deque[_Waiting] = deque()
        self._on_answer = on_answer
        self._concurrency = concurrency
        self._retry_for_s = retry_for_s
        self._num_workers = 0
        self._since_refusal = 0
        """Answers."""
        self._last_answer_s = float("-inf")

    async def run(self) -> None:
        """Until all are answered or given up, or it stops. Raises a group of what `requests` and `on_answer` raise."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                self._begin_worker(group)

    def _begin_worker(self, group: asyncio.TaskGroup) -> None:
        self._num_workers += 1
        group.create_task(self._work(group))

    async def _work(self, group: asyncio.TaskGroup) -> None:
        while (waiting := self._next()) is not None:
            attempt = await self._send(waiting.request)
            pause_s = self._pause_s(waiting, attempt)
            if pause_s is None:
                self._keep(waiting, attempt)
                if self._num_workers < self._concurrency and self._since_refusal >= GROW_AFTER:
                    self._since_refusal = 0
                    self._begin_worker(group)
                continue
            if attempt.status == REFUSED:
                self._since_refusal = 0
                if self._num_workers > 1:
                    self._again.append(waiting)  # for whoever has an answer next
                    break
            await asyncio.sleep(pause_s)
            self._again.append(waiting)
        self._num_workers -= 1

    def _next(self) -> _Waiting | None:
        if self.stopped_by is not None:
            return None
        if self._again:
            return self._again.popleft()
        request = next(self._requests, None)
        return None if request is None else _Waiting(request)

    def _pause_s(self, waiting: _Waiting, attempt: Attempt) -> float | None:
        """Before it is sent again; None if it is not."""
        if not attempt.may_pass:
            return None
        now_s = time.monotonic()
        if waiting.num_failures == 0:
            waiting.failed_since_s = now_s
        # Not all at once: those that failed together would fail together again.
        if attempt.retry_after_s is None:
            pause_s = uniform(0.5, 1) * min(FIRST_PAUSE_S * 2**waiting.num_failures, MAX_PAUSE_S)
        else:
            pause_s = attempt.retry_after_s + uniform(0, FIRST_PAUSE_S)
        waiting.num_failures += 1
        since_s = waiting.failed_since_s
        if attempt.status == REFUSED:  # its turn comes, as long as others have theirs
            since_s = max(since_s, self._last_answer_s)
        return pause_s if now_s + pause_s <= since_s + self._retry_for_s else None

    def _keep(self, waiting: _Waiting, attempt: Attempt) -> None:
        self._on_answer(attempt.answer)
        if not attempt.may_pass:
            self._last_answer_s = time.monotonic()
            self._since_refusal += 1
        is_away = attempt.may_pass and self._retry_for_s > 0 and self._last_answer_s < waiting.failed_since_s
        if is_away or attempt.status == NO_KEY:
            self.stopped_by = self.stopped_by or attempt.answer

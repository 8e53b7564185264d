"""Decides which request of a batch is sent next, how many run concurrently, and when to give one up."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import uniform

from loraserve.cli.batches.batch_answer import BatchAnswer
from loraserve.cli.batches.batch_requests import BatchRequest
from loraserve.cli.batches.sender import Attempt, Trouble

FIRST_PAUSE_S = 0.5
"""Doubled after each failure."""
MAX_PAUSE_S = 8.0
MAX_ERRORS = 3
"""Server errors after which a request has failed."""
GROW_AFTER = 16
"""After this many answers without a 429, one more request runs concurrently, up to the chosen concurrency."""


@dataclass(slots=True)
class _Waiting:
    request: BatchRequest
    num_errors: int = 0
    """Server errors, not counting 502, 503 and 504: see `Trouble`."""
    failed_since_s: float | None = None
    """Time of its first failure. Once it was refused (429): the time of the last answer to any request, if later."""
    was_refused: bool = False
    next_pause_s: float = FIRST_PAUSE_S
    """Upper limit of the next pause, if the server does not send Retry-After."""


class Dispatch:
    """Resends failed requests that may succeed later, before new ones.

    After a 429, one request fewer runs concurrently, so that no request is refused again and again while others take
    its place.
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
        """on_answer: called once per request, also for requests that were given up."""
        self.stopped_by: BatchAnswer | None = None
        """The failure after which sending stopped, because other requests would have failed the same way."""
        self._send = send
        self._requests = requests
        self._retries: deque[_Waiting] = deque()
        self._on_answer = on_answer
        self._concurrency = concurrency
        self._retry_for_s = retry_for_s
        self._num_workers = 0
        self._since_refusal = 0
        """Answers since the last 429."""
        self._given_up_since_answer = 0
        self._last_answer_s = float("-inf")
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Runs until all are answered or given up, or it stops.

        Raises an exception group with the errors of `requests` and `on_answer`.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                self._begin_worker(group)

    def _begin_worker(self, group: asyncio.TaskGroup) -> None:
        self._num_workers += 1
        group.create_task(self._work(group))

    async def _work(self, group: asyncio.TaskGroup) -> None:
        while (waiting := self._next()) is not None:
            attempt = await self._send(waiting.request)
            pause_s = self._after_failure(waiting, attempt) if attempt.trouble else None
            if pause_s is None:
                self._on_answer(attempt.answer)
                self._count(attempt)
                if self._num_workers < self._concurrency and self._since_refusal >= GROW_AFTER:
                    self._since_refusal = 0
                    self._begin_worker(group)
                continue
            if attempt.trouble is Trouble.REFUSED:
                self._since_refusal = 0
                if self._num_workers > 1:
                    self._retries.append(waiting)  # for the next worker that gets an answer
                    break
            await self._pause(pause_s)
            self._retries.append(waiting)
        self._num_workers -= 1

    def _next(self) -> _Waiting | None:
        if self._stopped.is_set():
            return None
        if self._retries:
            return self._retries.popleft()
        request = next(self._requests, None)
        return None if request is None else _Waiting(request)

    def _after_failure(self, waiting: _Waiting, attempt: Attempt) -> float | None:
        """Counts the failure. Returns the pause before the request is sent again; None = give up."""
        now_s = time.monotonic()
        if waiting.failed_since_s is None:
            waiting.failed_since_s = now_s
        waiting.was_refused |= attempt.trouble is Trouble.REFUSED
        if waiting.was_refused:  # it will get its turn as long as others are answered
            waiting.failed_since_s = max(waiting.failed_since_s, self._last_answer_s)
        # Random, because requests that failed together and retried together would fail again.
        if attempt.retry_after_s is None:
            pause_s = uniform(0.5, 1) * waiting.next_pause_s
            waiting.next_pause_s = min(2 * waiting.next_pause_s, MAX_PAUSE_S)
        else:
            pause_s = attempt.retry_after_s + uniform(0, FIRST_PAUSE_S)
        waiting.num_errors += attempt.trouble is Trouble.ERROR
        if waiting.num_errors >= MAX_ERRORS:
            return None
        return pause_s if now_s + pause_s <= waiting.failed_since_s + self._retry_for_s else None

    def _count(self, attempt: Attempt) -> None:
        """Counts a final answer. Stops if the next request would fail too: the key is refused, or no answers arrive."""
        if attempt.trouble in (None, Trouble.ERROR):
            self._last_answer_s = time.monotonic()
            self._since_refusal += 1
            self._given_up_since_answer = 0
            is_over = attempt.has_no_key
        else:
            self._given_up_since_answer += 1
            is_over = self._retry_for_s > 0 and self._given_up_since_answer >= max(2, self._num_workers)
        if is_over and self.stopped_by is None:
            self.stopped_by = attempt.answer
            self._stopped.set()

    async def _pause(self, seconds: float) -> None:
        """Returns early if sending stops."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace

import pytest
from msgspec import Raw

from loraserve.cli.batches import dispatch as module
from loraserve.cli.batches.batch_answer import BatchAnswer, BatchResponse
from loraserve.cli.batches.batch_requests import BatchRequest
from loraserve.cli.batches.dispatch import GROW_AFTER, MAX_PAUSE_S, Dispatch
from loraserve.cli.batches.sender import Attempt
from loraserve.cli.failure import Failure

AWAY = -1
"""In place of a status: no answer."""


def attempt(request: BatchRequest, status: int = 200, retry_after_s: float | None = None) -> Attempt:
    if status == AWAY:
        return Attempt(BatchAnswer("x", request.custom_id, None, Failure("connection", "refused")))
    answer = BatchAnswer("x", request.custom_id, BatchResponse(status, "", Raw(b"{}")))
    return Attempt(answer, status, retry_after_s)


class Clock:
    """Time passes only during pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.pauses_s: list[float] = []

        async def pause(_: Dispatch, seconds: float) -> None:
            self.pauses_s.append(seconds)
            self.now_s += seconds
            await asyncio.sleep(0)

        monkeypatch.setattr(Dispatch, "_pause", pause)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def requests(count: int) -> Iterator[BatchRequest]:
    return (BatchRequest(f"r{i}", "/v1/completions", {}) for i in range(count))


def dispatched(
    send: Callable[[BatchRequest], Awaitable[Attempt]], count: int = 1, concurrency: int = 1, retry_for_s: float = 300.0
) -> tuple[list[BatchAnswer], BatchAnswer | None]:
    """All answers, and the one that stopped the batch."""
    answers: list[BatchAnswer] = []
    dispatch = Dispatch(send, requests(count), answers.append, concurrency=concurrency, retry_for_s=retry_for_s)
    asyncio.run(dispatch.run())
    return answers, dispatch.stopped_by


def in_turn(*statuses: int, retry_after_s: float | None = None) -> Callable[[BatchRequest], Awaitable[Attempt]]:
    """Answers with these statuses in order, and then repeats the last one."""
    left = list(statuses)

    async def send(request: BatchRequest) -> Attempt:
        return attempt(request, left.pop(0) if len(left) > 1 else left[0], retry_after_s)

    return send


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_the_given_number_of_requests_run_concurrently_and_each_is_answered_once(concurrency: int) -> None:
    running, most = 0, 0

    async def send(request: BatchRequest) -> Attempt:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return attempt(request)

    answers, stopped_by = dispatched(send, 20, concurrency)
    assert sorted(answer.custom_id for answer in answers) == sorted(f"r{i}" for i in range(20))
    assert (most, stopped_by) == (concurrency, None)


@pytest.mark.parametrize("status", [AWAY, 408, 429, 503])
def test_a_temporary_failure_is_retried_after_growing_pauses(status: int, clock: Clock) -> None:
    (answer,), stopped_by = dispatched(in_turn(*[status] * 8, 200))
    assert (answer.failure, stopped_by) == (None, None)
    assert 0.25 <= clock.pauses_s[0] <= 0.5 <= clock.pauses_s[1] <= 1
    assert all(MAX_PAUSE_S / 2 <= pause_s <= MAX_PAUSE_S for pause_s in clock.pauses_s[4:])
    assert len(clock.pauses_s) == 8


def test_a_server_may_be_unreachable_for_hours(clock: Clock) -> None:
    (answer,), _ = dispatched(in_turn(*[AWAY] * 2000, 200), retry_for_s=86_400)
    assert answer.failure is None


def test_a_server_error_after_a_restart_counts_as_one_error(clock: Clock) -> None:
    (answer,), _ = dispatched(in_turn(500, AWAY, 503, 503, 500, 200))
    assert answer.failure is None


def test_the_retry_after_of_a_server_is_respected(clock: Clock) -> None:
    dispatched(in_turn(503, 200, retry_after_s=7))
    (pause_s,) = clock.pauses_s
    assert 7 <= pause_s <= 7.5


def test_a_permanent_error_is_not_retried(clock: Clock) -> None:
    answers, stopped_by = dispatched(in_turn(400, 404, 200), 3)
    assert [answer.failure is None for answer in answers] == [False, False, True]
    assert (clock.pauses_s, stopped_by) == ([], None)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_server_error_is_retried_twice_and_does_not_stop_the_batch(concurrency: int, clock: Clock) -> None:
    async def send(request: BatchRequest) -> Attempt:
        await asyncio.sleep(0)
        return attempt(request, 500 if int(request.custom_id[1:]) < 40 else 200)

    answers, stopped_by = dispatched(send, 100, concurrency)
    failed = {answer.custom_id for answer in answers if answer.failure}
    assert (failed, len(answers), stopped_by) == ({f"r{i}" for i in range(40)}, 100, None)
    assert len(clock.pauses_s) == 2 * 40


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_request_that_alone_gets_no_answer_is_given_up_and_does_not_stop_the_batch(
    concurrency: int, clock: Clock
) -> None:
    num_others = 0

    async def send(request: BatchRequest) -> Attempt:
        nonlocal num_others
        await asyncio.sleep(0)
        clock.now_s += 0.1
        num_others += request.custom_id != "r0"
        return attempt(request, AWAY if request.custom_id == "r0" else 200)

    answers, stopped_by = dispatched(send, 500, concurrency, retry_for_s=20)
    failed = [answer.custom_id for answer in answers if answer.failure]
    assert (failed, len(answers), num_others, stopped_by) == (["r0"], 500, 499, None)
    assert sum(clock.pauses_s) <= 20


def test_other_requests_are_answered_while_one_pauses(clock: Clock) -> None:
    order: list[str] = []

    async def send(request: BatchRequest) -> Attempt:
        order.append(request.custom_id)
        await asyncio.sleep(0)
        return attempt(request, AWAY if order.count("r0") < 3 and request.custom_id == "r0" else 200)

    assert len(dispatched(send, 50, 2)[0]) == 50
    first, second, third = (i for i, name in enumerate(order) if name == "r0")
    assert first + 1 < second
    assert second + 1 < third


def test_refusals_do_not_shorten_the_retry_time_of_a_later_failure(clock: Clock) -> None:
    """r0 is refused for a long time while others are answered, and then gets no answer once."""
    num_asked = 0

    async def send(request: BatchRequest) -> Attempt:
        nonlocal num_asked
        await asyncio.sleep(0)
        clock.now_s += 5
        if request.custom_id != "r0":
            return attempt(request)
        num_asked += 1
        return attempt(request, 429 if num_asked <= 10 else AWAY if num_asked == 11 else 200)

    answers, _ = dispatched(send, 200, 16, retry_for_s=20)
    assert num_asked == 12
    assert all(answer.failure is None for answer in answers)


def test_the_retry_time_counts_from_the_first_failure(clock: Clock) -> None:
    statuses = iter([AWAY, 200])

    async def send(request: BatchRequest) -> Attempt:
        clock.now_s += 1000  # a long answer
        return attempt(request, next(statuses))

    (answer,), _ = dispatched(send)
    assert answer.failure is None


def test_few_new_requests_are_sent_to_a_server_that_does_not_answer(clock: Clock) -> None:
    sent: Counter[str] = Counter()

    async def send(request: BatchRequest) -> Attempt:
        sent[request.custom_id] += 1
        return attempt(request, AWAY)

    answers, stopped_by = dispatched(send, 1000, 4, retry_for_s=60)
    assert stopped_by in answers
    assert len(answers) <= len(sent) <= 8
    assert clock.now_s - 1000 <= 8 * 60


def test_a_retry_after_longer_than_the_retry_time_stops_the_batch(clock: Clock) -> None:
    answers, stopped_by = dispatched(in_turn(429, retry_after_s=3600), 1000)
    assert len(answers) == 2
    assert answers[-1] is stopped_by
    assert clock.pauses_s == []


def test_a_long_retry_after_for_some_requests_does_not_stop_the_batch(clock: Clock) -> None:
    async def send(request: BatchRequest) -> Attempt:
        return attempt(request, 429, 3600) if request.custom_id.endswith("7") else attempt(request)

    answers, stopped_by = dispatched(send, 100)
    assert (len(answers), stopped_by) == (100, None)
    assert sum(answer.failure is not None for answer in answers) == 10


def test_a_pausing_request_ends_at_once_when_the_batch_stops() -> None:
    async def send(request: BatchRequest) -> Attempt:
        if request.custom_id == "r0":
            return attempt(request, 503, 200)
        await asyncio.sleep(0.01)
        return attempt(request, 401)

    answers, stopped_by = asyncio.run(asyncio.wait_for(asyncio.to_thread(dispatched, send, 9, 2), 20))
    assert [answer.custom_id for answer in answers] == ["r1"]
    assert stopped_by is answers[0]


def test_a_key_that_is_no_longer_accepted_stops_the_batch() -> None:
    answers, stopped_by = dispatched(in_turn(200, 401), 1000)
    assert [answer.failure is None for answer in answers] == [True, False]
    assert stopped_by is answers[-1]


@pytest.mark.parametrize("status", [AWAY, 429, 503])
def test_without_retries_each_request_is_sent_once(status: int, clock: Clock) -> None:
    answers, stopped_by = dispatched(in_turn(status), 50, 4, retry_for_s=0)
    assert len(answers) == 50
    assert (clock.pauses_s, stopped_by) == ([], None)


class Limited:
    """A server that runs `limit` requests concurrently and refuses others."""

    def __init__(self, limit: int) -> None:
        self.limit, self.running, self.most = limit, 0, 0
        self.num_refused = 0

    async def send(self, request: BatchRequest) -> Attempt:
        if self.running >= self.limit:
            self.num_refused += 1
            return attempt(request, 429, 1.0)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(5):
            await asyncio.sleep(0)
        self.running -= 1
        return attempt(request)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_under_a_concurrency_limit_no_request_fails_and_few_are_refused(limit: int, clock: Clock) -> None:
    server = Limited(limit)
    answers, stopped_by = dispatched(server.send, 400, 16, retry_for_s=2)
    assert stopped_by is None
    assert [answer.failure for answer in answers] == [None] * 400
    assert server.most == limit
    assert server.num_refused <= 16 + 400 / GROW_AFTER + 1
    assert sum(clock.pauses_s) <= 3


def test_full_concurrency_returns_once_a_limit_is_lifted() -> None:
    server = Limited(1)

    async def send(request: BatchRequest) -> Attempt:
        if request.custom_id == "r20":
            server.limit, server.most = 100, 0
        return await server.send(request)

    answers, _ = dispatched(send, 400, 8)
    assert len(answers) == 400
    assert server.most == 8


def test_an_error_while_an_answer_is_written_stops_the_batch() -> None:
    def full(_: BatchAnswer) -> None:
        raise RuntimeError("full")

    dispatch = Dispatch(in_turn(200), requests(9), full, concurrency=1, retry_for_s=0)
    with pytest.RaisesGroup(RuntimeError):
        asyncio.run(dispatch.run())

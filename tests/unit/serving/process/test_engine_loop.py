from types import SimpleNamespace

import pytest

from loraserve.engine.request import (
    EngineErrorCode,
    EngineRequest,
    EngineStats,
    FinishReason,
    SamplingParams,
    SequenceOutput,
)
from loraserve.serving.process.engine_loop import STATS_INTERVAL_S, EngineLoop
from loraserve.serving.process.messages import (
    Abort,
    AddRequest,
    FromEngine,
    PromptsBegun,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from tests.support.fake_engine import FakeEngine


class Wire:
    """A channel that gives one batch of messages per step, then shuts the loop down."""

    def __init__(self, *batches: list[ToEngine]) -> None:
        self._batches = list(batches)
        self.sent: list[FromEngine] = []

    def receive(self, timeout_s: float) -> list[ToEngine]:
        return self._batches.pop(0) if self._batches else [Shutdown()]

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def outputs(self) -> list[SequenceOutput]:
        return [output for message in self.sent if isinstance(message, StepOutputs) for output in message.outputs]


def request(request_id: str, max_tokens: int = 100, n: int = 3) -> EngineRequest:
    return EngineRequest(request_id, [1], SamplingParams(max_tokens, n=n))


def run(*batches: list[ToEngine]) -> list[SequenceOutput]:
    wire = Wire(*batches)
    EngineLoop(FakeEngine(), wire).run()
    return wire.outputs()


def ends(outputs: list[SequenceOutput]) -> list[tuple[str, int, FinishReason]]:
    return [(o.request_id, o.index, o.finish_reason) for o in outputs if o.finish_reason is not None]


def test_a_single_choice_can_be_aborted_and_every_choice_ends_once() -> None:
    aborts: list[ToEngine] = [Abort("a", 1), Abort("a", 1), Abort("a", 9), Abort("unknown", 0)]
    outputs = run([AddRequest(request("a")), AddRequest(request("b"))], aborts, [], [Abort("b")], [])
    assert ends(outputs) == [
        (name, index, FinishReason.ABORT)
        for name, index in [("a", 1), ("b", 0), ("b", 1), ("b", 2), ("a", 0), ("a", 2)]
    ]
    num_tokens = [
        sum(o.request_id == "a" and o.index == index and bool(o.token_ids) for o in outputs) for index in (0, 1)
    ]
    assert num_tokens[1] < num_tokens[0]


@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_an_abort_in_the_same_batch_as_its_add_is_answered(num_batches: int) -> None:
    add = AddRequest(request("a", n=2))
    outputs = run([add, Abort("a", 0), Abort("a", 1)], *[[] for _ in range(num_batches)])
    assert ends(outputs) == [("a", 0, FinishReason.ABORT), ("a", 1, FinishReason.ABORT)]


def test_prompts_are_reported_as_begun_before_their_step_is_done() -> None:
    wire = Wire([AddRequest(request("a", max_tokens=2, n=1))], [AddRequest(request("b", max_tokens=2, n=1))], [], [])
    EngineLoop(FakeEngine(), wire).run()
    told = [
        [prompt.request_id for prompt in message.prompts]
        if isinstance(message, PromptsBegun)
        else sorted({output.request_id for output in message.outputs})
        for message in wire.sent
        if isinstance(message, PromptsBegun) or (isinstance(message, StepOutputs) and message.outputs)
    ]
    assert told == [["a"], ["a"], ["b"], ["a", "b"], ["b"]]


def test_a_refused_request_has_an_error_code() -> None:
    outputs = run([AddRequest(request("a", max_tokens=-1, n=1))])
    assert [(o.finish_reason, o.error_code) for o in outputs] == [(FinishReason.ERROR, EngineErrorCode.INVALID_REQUEST)]


def test_a_refused_duplicate_of_a_request_id_does_not_affect_the_first() -> None:
    outputs = run([AddRequest(request("a", max_tokens=3, n=2))], [AddRequest(request("a"))], [], [], [])
    refused = [o for o in outputs if o.finish_reason is FinishReason.ERROR]
    assert [(o.index, o.error) for o in refused] == [(index, "request id 'a' is in use") for index in range(3)]
    assert [end for end in ends(outputs) if end[2] is not FinishReason.ERROR] == [
        ("a", 0, FinishReason.LENGTH),
        ("a", 1, FinishReason.LENGTH),
    ]


def test_a_request_id_can_be_reused_in_the_batch_that_aborts_it() -> None:
    outputs = run([AddRequest(request("a")), Abort("a"), AddRequest(request("a", max_tokens=2))], [], [], [])
    assert ends(outputs) == [("a", index, FinishReason.ABORT) for index in range(3)] + [
        ("a", index, FinishReason.LENGTH) for index in range(3)
    ]


class Measured(FakeEngine):
    """An engine with a clock: a step takes 10 ms, statistics take `stats_s`."""

    now_s = 0.0

    def __init__(self, stats_s: float) -> None:
        super().__init__()
        self._stats_s = stats_s

    def step(self) -> list[SequenceOutput]:
        self.now_s += 0.01
        return super().step()

    def stats(self, *, list_residents: bool = True) -> EngineStats:
        self.now_s += self._stats_s
        return super().stats(list_residents=list_residents)


@pytest.mark.parametrize(("stats_s", "apart_s"), [(0.0, 0.1), (0.005, 0.1), (0.02, 0.4), (0.5, 1.0)])
def test_slow_statistics_are_sent_less_often(monkeypatch: pytest.MonkeyPatch, stats_s: float, apart_s: float) -> None:
    engine = Measured(stats_s)
    monkeypatch.setattr("loraserve.serving.process.engine_loop.time", SimpleNamespace(monotonic=lambda: engine.now_s))
    wire = Wire([AddRequest(request("a", max_tokens=10**6, n=1))], *[[]] * 400)
    EngineLoop(engine, wire).run()
    num_told = sum(isinstance(message, StepOutputs) and message.stats is not None for message in wire.sent)
    assert num_told == pytest.approx(engine.now_s / apart_s, rel=0.2)


def test_resident_adapters_are_listed_once_per_interval_and_soon_after_the_last_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[object] = []
    engine, line = Measured(0.0), Line(log)
    monkeypatch.setattr("loraserve.serving.process.engine_loop.time", SimpleNamespace(monotonic=lambda: line.now_s))
    line.coming = {number: AddRequest(request(str(number), max_tokens=1, n=1)) for number in (1, 2, 3)}
    loop = EngineLoop(engine, line)
    for _ in range(4):
        loop.run_once(1.0)
    loop.run_once(1.0)
    told = [entry.stats for entry in log if isinstance(entry, StepOutputs)]
    assert [stats is not None and stats.lists_residents for stats in told] == [True, False, False, True, True]
    waits_s = [entry for entry in log if isinstance(entry, float) and entry > 0]
    assert waits_s == pytest.approx([STATS_INTERVAL_S, 1.0])


class Prepared(FakeEngine):
    """Needs `num_slices` slices of idle time."""

    def __init__(self, num_slices: int, log: list[object]) -> None:
        super().__init__()
        self.num_slices = num_slices
        self._log = log

    def use_idle_time(self) -> bool:
        if self.num_slices == 0:
            return False
        self.num_slices -= 1
        self._log.append("slice")
        return True


class Line:
    """A channel with a clock; `coming` maps the number of a `receive` call to the message that it returns."""

    def __init__(self, log: list[object], look_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.look_s = look_s
        self.coming: dict[int, ToEngine] = {}
        self._log = log
        self._num_looks = 0

    def receive(self, timeout_s: float) -> list[ToEngine]:
        self._log.append(timeout_s)
        self.now_s += self.look_s + timeout_s
        self._num_looks += 1
        message = self.coming.pop(self._num_looks, None)
        return [] if message is None else [message]

    def send(self, message: FromEngine) -> None:
        self._log.append(message)


def idle_loop(
    monkeypatch: pytest.MonkeyPatch, num_slices: int, look_s: float = 0.0
) -> tuple[EngineLoop, Prepared, Line, list[object]]:
    log: list[object] = []
    engine, line = Prepared(num_slices, log), Line(log, look_s)
    monkeypatch.setattr("loraserve.serving.process.engine_loop.time", SimpleNamespace(monotonic=lambda: line.now_s))
    return EngineLoop(engine, line), engine, line, log


def test_an_idle_engine_uses_idle_time_between_polls_and_then_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _, _, log = idle_loop(monkeypatch, num_slices=2)
    loop.run_once(1.0)
    assert log[:-1] == [0.0, "slice", 0.0, "slice", 0.0, 1.0]
    assert isinstance(log[-1], StepOutputs), "a heartbeat, after all of the wait"
    log.clear()
    loop.run_once(1.0)
    assert log[:-1] == [0.0, 1.0]


def test_a_message_between_slices_is_handled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, engine, line, log = idle_loop(monkeypatch, num_slices=9)
    line.coming = {2: AddRequest(request("a", max_tokens=2, n=1))}
    loop.run_once(1.0)
    assert log[:3] == [0.0, "slice", 0.0]
    assert [output.token_ids for entry in log[3:] if isinstance(entry, StepOutputs) for output in entry.outputs] == [
        [0]
    ]
    loop.run_once(1.0)
    assert engine.num_slices == 8, "none while there is work"


def test_long_idle_work_neither_stops_nor_multiplies_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _, line, log = idle_loop(monkeypatch, num_slices=1000, look_s=0.125)
    start_s = line.now_s
    for _ in range(3):
        loop.run_once(1.0)
    assert sum(isinstance(entry, StepOutputs) for entry in log) == 3
    assert line.now_s - start_s == 3.0


def test_shutdown_does_not_wait_for_idle_work(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, engine, line, _ = idle_loop(monkeypatch, num_slices=1000)
    line.coming = {3: Shutdown()}
    loop.run()
    assert engine.num_slices == 998
    assert line.now_s == 100.0

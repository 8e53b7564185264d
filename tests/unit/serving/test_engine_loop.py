import pytest

from loraserve.engine.request import EngineErrorCode, EngineRequest, FinishReason, SamplingParams, SequenceOutput
from loraserve.serving.engine_loop import EngineLoop
from loraserve.serving.messages import Abort, AbortRequests, AddRequests, FromEngine, Shutdown, StepOutputs, ToEngine
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


def test_one_choice_is_aborted_and_every_choice_ends_once() -> None:
    aborts = AbortRequests([Abort("a", 1), Abort("a", 1), Abort("a", 9), Abort("unknown", 0)])
    outputs = run([AddRequests([request("a"), request("b")])], [aborts], [], [AbortRequests([Abort("b")])], [])
    assert ends(outputs) == [
        (name, index, FinishReason.ABORT)
        for name, index in [("a", 1), ("b", 0), ("b", 1), ("b", 2), ("a", 0), ("a", 2)]
    ]
    num_tokens = [
        sum(o.request_id == "a" and o.index == index and bool(o.token_ids) for o in outputs) for index in (0, 1)
    ]
    assert num_tokens[1] < num_tokens[0]


@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_an_abort_in_one_batch_with_its_add_is_answered(num_batches: int) -> None:
    add = AddRequests([request("a", n=2)])
    outputs = run([add, AbortRequests([Abort("a", 0), Abort("a", 1)])], *[[] for _ in range(num_batches)])
    assert ends(outputs) == [("a", 0, FinishReason.ABORT), ("a", 1, FinishReason.ABORT)]


def test_a_refusal_has_its_code() -> None:
    outputs = run([AddRequests([request("a", max_tokens=-1, n=1)])])
    assert [(o.finish_reason, o.error_code) for o in outputs] == [(FinishReason.ERROR, EngineErrorCode.INVALID_REQUEST)]


def test_a_refused_second_request_of_an_id_leaves_the_first_as_it_is() -> None:
    outputs = run([AddRequests([request("a", max_tokens=3, n=2)])], [AddRequests([request("a")])], [], [], [])
    refused = [o for o in outputs if o.finish_reason is FinishReason.ERROR]
    assert [(o.index, o.error) for o in refused] == [(index, "request id 'a' is in use") for index in range(3)]
    assert [end for end in ends(outputs) if end[2] is not FinishReason.ERROR] == [
        ("a", 0, FinishReason.LENGTH),
        ("a", 1, FinishReason.LENGTH),
    ]


def test_an_id_can_be_used_again_in_the_batch_that_aborts_it() -> None:
    again = [AddRequests([request("a")]), AbortRequests([Abort("a")]), AddRequests([request("a", max_tokens=2)])]
    outputs = run(again, [], [], [])
    assert ends(outputs) == [("a", index, FinishReason.ABORT) for index in range(3)] + [
        ("a", index, FinishReason.LENGTH) for index in range(3)
    ]

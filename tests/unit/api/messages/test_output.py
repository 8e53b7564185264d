import json
from typing import Any

import msgspec
import pytest

from loraserve.api.chat.tools import ToolUse
from loraserve.api.messages.output import MessageOutput
from loraserve.api.schemas.message_answer import AnswerBlock, AnswerText, AnswerThinking
from loraserve.engine.request import FinishReason
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.tool_calls.formats import ToolCallFormat

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
NAMED = ToolUse(named="add", schema={})
MAX_DEPTH = 10


def output(use: ToolUse = NAMED, *, fills_context: bool = False) -> MessageOutput:
    return MessageOutput(use, frozenset(), MAX_DEPTH, fills_context=fills_context)


def fed(grown: MessageOutput, *deltas: ChoiceDelta) -> list[AnswerBlock]:
    for delta in deltas:
        assert [*grown.feed(delta)]
    return grown.blocks


def delta(text: str = "", reason: FinishReason | None = None, **fields: Any) -> ChoiceDelta:
    return ChoiceDelta(0, 0, text=text, finish_reason=reason, **fields)


def input_of(written: str) -> Any:
    (block,) = fed(output(), delta(written, STOP))
    return json.loads(msgspec.json.encode(block))["input"]


def test_blocks_appear_once_they_are_complete() -> None:
    grown = output(ToolUse())
    assert fed(grown, delta(reasoning="Hm")) == []
    assert fed(grown, delta("a", reasoning=".")) == [AnswerThinking("Hm.", "unsigned")]
    assert grown.stop is None
    assert fed(grown, delta("b", STOP)) == [AnswerThinking("Hm.", "unsigned"), AnswerText("ab")]


def test_an_empty_answer_has_no_blocks() -> None:
    grown = output(ToolUse())
    assert [*grown.feed(delta("", STOP))] == []
    assert grown.blocks == []
    assert grown.stop is not None


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ('{"a": [1, 2.0]}', {"a": [1, 2.0]}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        (" {} ", {}),
    ],
)
def test_a_json_object_becomes_the_input(written: str, given: object) -> None:
    assert input_of(written) == given


@pytest.mark.parametrize(
    "written", ['{"a": 1', "[1]", "null", '{"a": None}', '{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1} x']
)
def test_arguments_that_are_not_a_json_object_are_returned_verbatim(written: str) -> None:
    assert input_of(written) == {"INVALID_JSON": written}


def test_arguments_nested_too_deep_to_be_sent_back_are_returned_verbatim() -> None:
    for depth in (MAX_DEPTH - 5, MAX_DEPTH - 4):
        written = '{"a":' * depth + "1" + "}" * depth
        assert ("INVALID_JSON" in input_of(written)) == (depth > MAX_DEPTH - 5)


@pytest.mark.parametrize(
    ("use", "last", "fills_context", "stop"),
    [
        (ToolUse(), delta("a", STOP), True, ("end_turn", None)),
        (ToolUse(), delta("a", STOP, stop_reason=7), False, ("end_turn", None)),
        (ToolUse(), delta("a", STOP, stop_reason="b"), False, ("stop_sequence", "b")),
        (ToolUse(), delta("a", LENGTH), False, ("max_tokens", None)),
        (ToolUse(), delta("a", LENGTH), True, ("model_context_window_exceeded", None)),
        (NAMED, delta("{}", STOP), False, ("tool_use", None)),
        (NAMED, delta("{}", STOP, stop_reason="b"), False, ("tool_use", None)),
        (NAMED, delta('{"a', STOP, stop_reason="b"), False, ("stop_sequence", "b")),
        (NAMED, delta('{"a', STOP), False, ("end_turn", None)),
        (NAMED, delta("{}", LENGTH), False, ("max_tokens", None)),
        (ToolUse(call_format=ToolCallFormat.HERMES), delta("a", STOP), False, ("end_turn", None)),
    ],
)
def test_the_stop_reason_tells_why_the_answer_ended(
    use: ToolUse, last: ChoiceDelta, fills_context: bool, stop: tuple[str, str | None]
) -> None:
    grown = output(use, fills_context=fills_context)
    fed(grown, last)
    assert grown.stop is not None
    assert (grown.stop.stop_reason, grown.stop.stop_sequence) == stop


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_aborted_or_failed_answer_is_an_error(reason: FinishReason) -> None:
    with pytest.raises(ServingError, match="Retry") as caught:
        fed(output(), delta("a"), delta("", reason))
    assert caught.value.code is ErrorCode.SERVER_DRAINING

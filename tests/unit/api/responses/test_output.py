from typing import Any, cast

import pytest

from loraserve.api.chat.tools import ToolUse
from loraserve.api.inference.token_names import TokenNames
from loraserve.api.responses.output import ResponseOutput
from loraserve.api.schemas.response_answer import OutputItem
from loraserve.engine.request import FinishReason
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.text.choice import ChoiceDelta


def output() -> ResponseOutput:
    return ResponseOutput("r1", ToolUse(), TokenNames(cast(Any, None), as_ids=False), None)


def fed(*deltas: tuple[str, FinishReason | None]) -> list[OutputItem]:
    grown = output()
    for text, reason in deltas:
        assert [*grown.feed(ChoiceDelta(0, 0, text, finish_reason=reason))]
    return grown.items


def test_items_appear_once_they_are_complete() -> None:
    assert fed(("a", None)) == []
    assert fed(("a", None), ("b", FinishReason.STOP)) == fed(("ab", FinishReason.STOP))
    assert [item.status for item in fed(("a", None), ("b", FinishReason.LENGTH))] == ["incomplete"]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_aborted_or_failed_answer_is_an_error(reason: FinishReason) -> None:
    with pytest.raises(ServingError, match="Retry") as caught:
        fed(("a", None), ("", reason))
    assert caught.value.code is ErrorCode.SERVER_DRAINING

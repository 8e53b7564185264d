import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

from loraserve.api.chat.tools import ToolUse
from loraserve.api.messages.output import MessageOutput
from loraserve.api.messages.writer import MessageWriter
from loraserve.engine.request import FinishReason
from loraserve.serving.generation import TokenUsage
from loraserve.serving.text.choice import ChoiceDelta


@dataclass
class Written:
    """A generation, its call, and the tokenizer that runs what is to be encoded."""

    finished: bool = False
    num_sent_prompt_tokens: int = 7
    is_closed: bool = False
    sizes: list[int] = field(default_factory=list)

    def usage(self) -> TokenUsage:
        return TokenUsage(0, 0, 0)

    def close(self) -> None:
        self.is_closed = True

    async def run(self, size: int, work: Any) -> Any:
        self.sizes.append(size)
        return work()


def streamed(use: ToolUse, *texts: str) -> tuple[list[tuple[bytes, bool]], list[int]]:
    """Each piece with whether the call was closed by then; and the sizes that were told of steps of two tokens."""
    it: Any = Written()

    async def steps() -> AsyncGenerator[list[ChoiceDelta]]:
        for index, text in enumerate(texts):
            it.finished = index == len(texts) - 1
            yield [
                ChoiceDelta(0, 0, text=text, token_ids=[1, 2], finish_reason=FinishReason.STOP if it.finished else None)
            ]

    async def written() -> list[tuple[bytes, bool]]:
        writer = MessageWriter("msg_1", "m", MessageOutput(use, frozenset(), 32, fills_context=False))
        events = writer.events(cast(Any, steps()), it, it, it, cast(Any, {"state": {}, "headers": []}))
        return [(piece, it.is_closed) async for piece in events]

    return asyncio.run(written()), it.sizes


def test_the_call_is_closed_before_the_last_bytes_are_given() -> None:
    pieces, _ = streamed(ToolUse(), "a", "b")
    assert [closed for _, closed in pieces] == [False, False, True]
    assert b"message_stop" in pieces[-1][0]


def test_a_prompt_that_has_not_begun_is_told_by_its_length() -> None:
    pieces, _ = streamed(ToolUse(), "a")
    assert b'"input_tokens":7,"output_tokens":0' in pieces[0][0]


def test_what_is_held_is_encoded_with_what_follows() -> None:
    pieces, sizes = streamed(ToolUse(named="add", schema={}), '{"a"', ": 1", "}")
    assert sizes == [2, 2, 4]
    assert len(pieces) == 3

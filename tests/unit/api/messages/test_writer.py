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
    """Stands in for a generation, its call and the tokenizer that runs the encoding."""

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
    """Each piece and whether the call was closed by then, and the sizes given to `run`; steps have two tokens."""
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


def test_the_call_is_closed_before_the_last_bytes_are_sent() -> None:
    pieces, _ = streamed(ToolUse(), "a", "b")
    assert [closed for _, closed in pieces] == [False, False, True]
    assert b"message_stop" in pieces[-1][0]


def test_input_tokens_of_a_prompt_that_has_not_begun_are_those_sent_to_the_engine() -> None:
    pieces, _ = streamed(ToolUse(), "a")
    assert b'"input_tokens":7,"output_tokens":0' in pieces[0][0]


def test_held_back_deltas_are_encoded_with_those_that_follow() -> None:
    pieces, sizes = streamed(ToolUse(named="add", schema={}), '{"a"', ": 1", "}")
    assert sizes == [2, 2, 4]
    assert len(pieces) == 3

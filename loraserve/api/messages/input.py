"""Turns the blocks of /v1/messages into the input of a chat template."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from loraserve.api.chat.conversations import SPLIT_TEXT, checked_template_kwargs
from loraserve.api.chat.tools import check_function_name
from loraserve.api.http.ranges import check_at_most
from loraserve.api.http.raw_json import parsed
from loraserve.api.messages.thinking import reasoning_effort, thinking_kwargs
from loraserve.api.schemas.messages import (
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.serving.errors import invalid_value
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.conversation import ChatMessage, Conversation, JsonObject, ToolCall

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (USER, ASSISTANT, SYSTEM)
OF_ROLES: dict[str, tuple[type, ...]] = {
    SYSTEM: (TextBlock,),
    USER: (TextBlock, ToolResultBlock),
}
"""Blocks allowed per role; the assistant may have all except tool results."""
CALL_ID_PREFIX = "toolu_"
"""Prefix of call ids that clients see. Templates get ids without it: Mistral's reject ids of any other length."""
FAILED = "Error"
"""Precedes the result of a failed call: templates have no other way to mark it."""


class _Block(NamedTuple):
    param: str
    block: ContentBlock


def message_conversation(
    body: MessagesRequest | CountTokensRequest, tools: Sequence[JsonObject], limits: RequestLimits
) -> Conversation:
    """Consecutive blocks of the same role are one turn, as in Anthropic's API. Raises `ServingError` naming the invalid
    field."""
    if not body.messages:
        raise invalid_value("messages", "is empty.")
    _check_size(body, limits)
    messages: list[ChatMessage] = []
    for role, blocks in groupby(_numbered(body), key=lambda numbered: numbered[0]):
        messages += _turn(role, [block for _, block in blocks])
    continues_last = _continues_last(messages, len(body.messages) - 1)
    return Conversation(
        messages,
        add_generation_prompt=not continues_last,
        continue_final_message=continues_last,
        tools=tools,
        template_kwargs=thinking_kwargs(body.thinking) | checked_template_kwargs(body.chat_template_kwargs, limits),
        effort=reasoning_effort(body.thinking, body.output_config),
    )


def _check_size(body: MessagesRequest | CountTokensRequest, limits: RequestLimits) -> None:
    """Needed because a body of 2 MB has room for 80,000 blocks, which take 0.2 s."""
    if isinstance(body.system, list):
        check_at_most("system", len(body.system), limits.max_messages, "blocks")
    check_at_most("messages", len(body.messages), limits.max_messages, "messages")
    blocks = [block for message in body.messages if isinstance(message.content, list) for block in message.content]
    check_at_most("messages", len(blocks), limits.max_messages, "blocks")
    results = (block.content for block in blocks if isinstance(block, ToolResultBlock))
    num_parts = sum(len(content) for content in results if isinstance(content, list))
    check_at_most("messages", num_parts, limits.max_messages, "blocks in tool results")


def _numbered(body: MessagesRequest | CountTokensRequest) -> Iterator[tuple[str, _Block]]:
    """Every block with its role; empty content gives an empty text block."""
    if body.system:
        for block in _blocks("system", body.system):
            yield SYSTEM, block
    for index, message in enumerate(body.messages):
        param = f"messages[{index}]"
        if message.role not in ROLES:
            raise invalid_value(f"{param}.role", f"must be one of {', '.join(ROLES)}.")
        for block in _blocks(f"{param}.content", message.content or ""):
            yield message.role, block


def _blocks(param: str, content: str | Sequence[ContentBlock]) -> Iterator[_Block]:
    if isinstance(content, str):
        yield _Block(param, TextBlock(content))
        return
    for index, block in enumerate(content):
        yield _Block(f"{param}[{index}]", block)


def _turn(role: str, blocks: Sequence[_Block]) -> Iterator[ChatMessage]:
    for param, block in blocks:
        _check_block(param, role, block)
    if role == ASSISTANT:
        yield _assistants(blocks)
        return
    for is_result, of_kind in groupby(blocks, key=lambda numbered: isinstance(numbered.block, ToolResultBlock)):
        if is_result:
            yield from map(_result, of_kind)
        else:
            yield ChatMessage(role, _texts(of_kind))


def _assistants(blocks: Sequence[_Block]) -> ChatMessage:
    """Templates show the assistant's reasoning, text and calls in one turn as one message."""
    thoughts = [block.thinking for _, block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    calls = tuple(_call(param, block) for param, block in blocks if isinstance(block, ToolUseBlock))
    has_text = any(isinstance(block, TextBlock) for _, block in blocks)
    return ChatMessage(
        ASSISTANT,
        _texts(blocks) if has_text or not calls else None,
        tool_calls=calls,
        reasoning=SPLIT_TEXT.join(thoughts) or None,
    )


def _texts(blocks: Iterable[_Block]) -> str:
    return SPLIT_TEXT.join(block.text for _, block in blocks if isinstance(block, TextBlock))


def _result(numbered: _Block) -> ChatMessage:
    param, block = numbered
    assert isinstance(block, ToolResultBlock)
    text = _texts(_blocks(f"{param}.content", block.content or ""))
    if block.is_error:
        text = f"{FAILED}: {text}" if text else FAILED
    return ChatMessage("tool", text, tool_call_id=block.tool_use_id.removeprefix(CALL_ID_PREFIX))


def _call(param: str, block: ToolUseBlock) -> ToolCall:
    check_function_name(f"{param}.name", block.name)
    parsed(f"{param}.input", block.input)
    arguments = msgspec.json.encode(block.input).decode()
    return ToolCall(block.id.removeprefix(CALL_ID_PREFIX), block.name, arguments)


def _check_block(param: str, role: str, block: ContentBlock) -> None:
    is_of_role = isinstance(block, OF_ROLES[role]) if role in OF_ROLES else not isinstance(block, ToolResultBlock)
    if not is_of_role:
        raise invalid_value(
            f"{param}.type", f"is {type(block).__struct_config__.tag!r}, which is not allowed for role {role!r}."
        )
    refuse_unsupported(block, f"{param}.")
    if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
        for index, part in enumerate(block.content):
            refuse_unsupported(part, f"{param}.content[{index}].")


def _continues_last(messages: Sequence[ChatMessage], last_index: int) -> bool:
    """Whether the answer continues a message that the assistant has begun."""
    last = messages[-1]
    if last.role != ASSISTANT:
        return False
    param = f"messages[{last_index}].content"
    if last.tool_calls:
        raise invalid_value(param, "has calls whose results do not follow. Send them as 'tool_result' blocks.")
    if not last.content:
        raise invalid_value(param, "has no text that the answer could continue. Leave the message out.")
    return True

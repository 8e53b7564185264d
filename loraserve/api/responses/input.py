"""Turns the items of a response's `input` into the input of a chat template."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from msgspec import Raw

from loraserve.api.chat.conversations import (
    SPLIT_TEXT,
    checked_budget,
    checked_call,
    checked_effort,
    checked_template_kwargs,
    text_of,
)
from loraserve.api.http.ranges import check_at_most
from loraserve.api.responses.kinds import (
    CALL,
    CALL_OUTPUT,
    MESSAGE,
    REASONING,
    REASONING_PARTS,
    SUMMARY_PARTS,
    TEXT_PARTS,
    check_item_type,
)
from loraserve.api.schemas.responses import InputItem, InputPart, ResponsesRequest
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.serving.errors import invalid_value, missing
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.conversation import ChatMessage, Conversation, JsonObject, ToolCall

FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    MESSAGE: (("role", "content"), ()),
    REASONING: ((), ("content", "summary")),
    CALL: (("call_id", "name", "arguments"), ()),
    CALL_OUTPUT: (("call_id", "output"), ("name",)),
}
"""By type of item: required fields, and optional ones."""
OF_ALL_ITEMS = frozenset({"type", "id", "status"})
ROLES = ("system", "developer", "user", "assistant")


def response_conversation(body: ResponsesRequest, tools: Sequence[JsonObject], limits: RequestLimits) -> Conversation:
    """Raises `ServingError` naming the invalid field."""
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if not items:
        raise invalid_value("input", "is empty.")
    check_at_most("input", len(items), limits.max_messages, "items")
    messages = [ChatMessage("system", body.instructions)] if body.instructions else []
    for kind, numbered in groupby(enumerate(items), key=lambda numbered: numbered[1].type):
        if kind == CALL:
            _add_calls(messages, numbered, limits)
            continue
        added = [_message(f"input[{index}]", item) for index, item in numbered]
        for message in [_thoughts(added)] if kind == REASONING else added:
            _add(messages, message)
    if not messages:
        raise invalid_value("input", "has no text.")
    messages = [replace(each, content="") if _is_reasoning(each) else each for each in messages]
    kwargs = checked_template_kwargs(body.chat_template_kwargs, limits)
    effort = checked_effort("reasoning.effort", body.reasoning.effort if body.reasoning else None)
    budget = checked_budget(body.thinking_token_budget)
    return Conversation(messages, tools=tools, template_kwargs=kwargs, effort=effort, budget=budget, param="input")


def _message(param: str, item: InputItem) -> ChatMessage:
    _check_fields(param, item)
    if item.type == REASONING:
        content = _text(f"{param}.content", item.content, REASONING_PARTS)
        summary = _text(f"{param}.summary", item.summary, SUMMARY_PARTS)
        return ChatMessage("assistant", None, reasoning=content or summary)
    if item.type == CALL_OUTPUT:
        return ChatMessage("tool", _text(f"{param}.output", item.output), item.name, tool_call_id=item.call_id)
    if item.role not in ROLES:
        raise invalid_value(f"{param}.role", f"must be one of {', '.join(ROLES)}.")
    return ChatMessage(item.role, _text(f"{param}.content", item.content))


def _thoughts(messages: Sequence[ChatMessage]) -> ChatMessage:
    """Joins consecutive reasoning items, all at once: one by one, 4000 of 450 characters took 0.2 s."""
    texts = [each.reasoning for each in messages if each.reasoning]
    return ChatMessage("assistant", None, reasoning=SPLIT_TEXT.join(texts))


def _is_reasoning(message: ChatMessage) -> bool:
    """Whether it is a turn with nothing but reasoning so far."""
    return message.reasoning is not None and message.content is None and not message.tool_calls


def _add(messages: list[ChatMessage], message: ChatMessage) -> None:
    """Joins text to the reasoning before it: templates show one turn's reasoning, text and calls as one message."""
    if message.reasoning == "":
        return  # Some clients leave out the text of reasoning, or got it from a provider that hides it.
    if messages and _is_reasoning(messages[-1]) and message.role == "assistant":
        message = replace(message, reasoning=messages.pop().reasoning)
    messages.append(message)


def _add_calls(messages: list[ChatMessage], numbered: Iterable[tuple[int, InputItem]], limits: RequestLimits) -> None:
    """Adds calls to the turn that they belong to, for the same reason as `_add`."""
    calls = tuple(_call(f"input[{index}]", item, limits) for index, item in numbered)
    last = messages.pop() if messages and messages[-1].role == "assistant" else ChatMessage("assistant", None)
    messages.append(replace(last, tool_calls=last.tool_calls + calls))


def _call(param: str, item: InputItem, limits: RequestLimits) -> ToolCall:
    _check_fields(param, item)
    return checked_call(param, item.call_id or "", item.name or "", item.arguments or "", limits)


def _check_fields(param: str, item: InputItem) -> None:
    check_item_type(param, item.type)
    refuse_unsupported(item, f"{param}.")
    needed, allowed = FIELDS[item.type]
    for field in item.__struct_fields__:
        value = getattr(item, field)
        if value is None and field in needed:
            raise missing(f"{param}.{field}")
        if value is not None and not isinstance(value, Raw) and field not in {*OF_ALL_ITEMS, *needed, *allowed}:
            raise invalid_value(f"{param}.{field}", f"is not allowed in an item of type {item.type!r}.")


def _text(param: str, content: str | list[InputPart] | None, kinds: tuple[str, ...] = TEXT_PARTS) -> str:
    parts = content or ""
    text = text_of(param, parts, kinds)
    for index, part in enumerate(parts if isinstance(parts, list) else []):
        refuse_unsupported(part, f"{param}[{index}].")
    return text

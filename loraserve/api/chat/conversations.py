"""Turns the messages of a request into the input of a chat template."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from loraserve.api.chat.tools import check_function_name, check_is_function
from loraserve.api.http.nesting import nesting_depth
from loraserve.api.http.ranges import INT64, check_at_most, check_range, unsupported
from loraserve.api.http.raw_json import num_bytes_of, parsed
from loraserve.api.schemas.chat import ChatCompletionRequest, RequestMessage
from loraserve.api.schemas.tokenize import TokenizeRequest
from loraserve.api.schemas.tools import RequestToolCall
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.serving.errors import invalid_value, missing
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.conversation import (
    ChatMessage,
    Conversation,
    JsonObject,
    ReasoningBudget,
    ReasoningEffort,
    ToolCall,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BUDGET = "thinking_token_budget"
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text",)
SPLIT_TEXT = "\n"
"""Separates the text parts of one message, as in vLLM."""
JSON_OBJECT = msgspec.json.Decoder(dict[str, Raw])
"""Validates all of the JSON, but parses only the outermost level."""


class Part(Protocol):
    """A part of a message."""

    @property
    def type(self) -> str: ...

    @property
    def text(self) -> str | None: ...


def conversation_of(
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[RequestMessage],
    tools: Sequence[JsonObject],
    limits: RequestLimits,
    effort: str | None = None,
    budget: int | None = None,
) -> Conversation:
    """Raises `ServingError` naming the invalid field."""
    if not messages:
        raise invalid_value("messages", "is empty.")
    check_at_most("messages", len(messages), limits.max_messages, "messages")
    num_calls = sum(len(message.tool_calls or ()) for message in messages)
    check_at_most("messages", num_calls, limits.max_messages, "tool calls")
    if body.continue_final_message:
        _check_continued(body.add_generation_prompt, messages[-1])
    return Conversation(
        messages=[_chat_message(f"messages[{index}]", message, limits) for index, message in enumerate(messages)],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=tools,
        template_kwargs=checked_template_kwargs(body.chat_template_kwargs, limits),
        effort=checked_effort("reasoning_effort", effort),
        budget=checked_budget(budget),
    )


def _check_continued(add_generation_prompt: bool, last: RequestMessage) -> None:
    if add_generation_prompt:
        raise invalid_value("continue_final_message", "needs 'add_generation_prompt': false.")
    if last.role != "assistant" or last.content is None:
        raise invalid_value("continue_final_message", "requires a last message with role 'assistant' and content.")


def checked_template_kwargs(given: dict[str, Raw] | None, limits: RequestLimits) -> dict[str, Any]:
    """Checks only the size: the template decides which names may be set. Raises `ServingError`."""
    param, given = "chat_template_kwargs", given or {}
    check_at_most(param, len(given), limits.max_template_kwargs, "entries")
    check_at_most(param, num_bytes_of(given), limits.max_template_kwargs_bytes, "bytes")
    return parsed(param, given)


def checked_effort(param: str, value: str | None) -> ReasoningEffort | None:
    """Whether the model's template knows the value is checked when rendering. Raises `ServingError`."""
    if value is None:
        return None
    if value not in EFFORTS:
        raise invalid_value(param, f"is {value[:32]!r}; it must be one of {', '.join(EFFORTS)}.")
    return ReasoningEffort(param, value)


def checked_budget(max_tokens: int | None) -> ReasoningBudget | None:
    """None also for -1, as in vLLM. Raises `ServingError`."""
    if max_tokens is None:
        return None
    check_range(BUDGET, max_tokens, -1, INT64 - 1)
    return None if max_tokens == -1 else ReasoningBudget(BUDGET, max_tokens)


def _chat_message(param: str, message: RequestMessage, limits: RequestLimits) -> ChatMessage:
    refuse_unsupported(message, f"{param}.")
    if message.role == "function":
        raise unsupported(f"{param}.role", "is 'function', which is not supported. Use 'tool'.")
    if message.role not in ROLES:
        raise invalid_value(f"{param}.role", f"must be one of {', '.join(ROLES)}.")
    calls = message.tool_calls or []
    _check_fields_of_roles(param, message)
    reasoning = message.reasoning_content or message.reasoning or None
    content = message.content
    if content is None and not calls:
        if reasoning is None:
            raise missing(f"{param}.content")
        content = ""  # An answer that was cut off during the reasoning.
    return ChatMessage(
        message.role,
        None if content is None else text_of(f"{param}.content", content, TEXT_PARTS),
        message.name,
        tuple(_tool_call(f"{param}.tool_calls[{index}]", call, limits) for index, call in enumerate(calls)),
        message.tool_call_id,
        reasoning=reasoning,
    )


def _check_fields_of_roles(param: str, message: RequestMessage) -> None:
    if message.tool_calls and message.role != "assistant":
        raise invalid_value(f"{param}.tool_calls", "is only for role 'assistant'.")
    if message.role == "tool" and message.tool_call_id is None:
        raise missing(f"{param}.tool_call_id")
    if message.role != "tool" and message.tool_call_id is not None:
        raise invalid_value(f"{param}.tool_call_id", "is only for role 'tool'.")
    for name in ("reasoning_content", "reasoning"):
        if getattr(message, name) and message.role != "assistant":
            raise invalid_value(f"{param}.{name}", "is only for role 'assistant'.")


def _tool_call(param: str, call: RequestToolCall, limits: RequestLimits) -> ToolCall:
    check_is_function(param, call.type)
    if call.function is None:
        raise missing(f"{param}.function")
    return checked_call(f"{param}.function", call.id, call.function.name, call.function.arguments, limits)


def checked_call(param: str, call_id: str, name: str, arguments: str, limits: RequestLimits) -> ToolCall:
    """param: the object with name and arguments. Raises `ServingError`."""
    check_function_name(f"{param}.name", name)
    arguments = arguments.strip() or "{}"
    _check_arguments(f"{param}.arguments", arguments, limits)
    return ToolCall(call_id, name, arguments)


def _check_arguments(param: str, arguments: str, limits: RequestLimits) -> None:
    depth = nesting_depth(arguments.encode(), limits.max_json_depth)
    if depth > limits.max_json_depth:
        raise invalid_value(param, f"is nested {depth} levels deep; the limit is {limits.max_json_depth}.")
    try:
        JSON_OBJECT.decode(arguments)
    except msgspec.DecodeError as error:
        # A model's arguments may be cut off. Clients can send such a call back, with its result.
        if not arguments.startswith("{"):
            raise invalid_value(param, f"must be a JSON object: {error}.") from error


def text_of(param: str, content: str | Sequence[Part], kinds: Collection[str], split: str = SPLIT_TEXT) -> str:
    """kinds: the types of parts that are text; split: the separator between parts. Raises `ServingError`."""
    if isinstance(content, str):
        return content
    return split.join(_part_text(f"{param}[{index}]", part, kinds) for index, part in enumerate(content))


def _part_text(param: str, part: Part, kinds: Collection[str]) -> str:
    if part.type not in kinds:
        raise unsupported(param, f"is of type {part.type[:32]!r}; only text is supported.")
    if part.text is None:
        raise missing(f"{param}.text")
    return part.text

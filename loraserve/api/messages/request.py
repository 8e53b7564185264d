"""Checks the fields of /v1/messages and turns them into a conversation and its constraints."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from loraserve.api.chat.prompts import with_call_format
from loraserve.api.chat.tools import NamedTool, ToolUse, checked_functions, chosen_use
from loraserve.api.http.ranges import INT64, check_at_most, check_range, unsupported
from loraserve.api.inference.sampling import CheckedSampling, SamplingChecker
from loraserve.api.inference.structured_outputs import RequestedFormat, text_format
from loraserve.api.messages.input import message_conversation
from loraserve.api.messages.kinds import ANY, AUTO, CHOICES, NONE, TOOL, check_tool_type
from loraserve.api.messages.thinking import thinking_budget
from loraserve.api.schemas.messages import (
    CountTokensRequest,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
)
from loraserve.api.schemas.tools import ToolFunction
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.serving.errors import invalid_value, missing
from loraserve.serving.settings import RequestLimits, ServingSettings
from loraserve.serving.text.conversation import Conversation, JsonObject

SERVICE_TIERS = ("auto", "standard_only")
WORDS = {AUTO: "auto", ANY: "required", NONE: "none"}
"""OpenAI's names of these choices."""


@dataclass(frozen=True, slots=True)
class CheckedMessage:
    sampling: CheckedSampling
    conversation: Conversation
    use: ToolUse
    eager_tools: frozenset[str]
    """Tools whose input is streamed as it is written."""


def checked_message(body: MessagesRequest, checker: SamplingChecker, settings: ServingSettings) -> CheckedMessage:
    """Raises `ServingError` naming the invalid field."""
    check_range("max_tokens", body.max_tokens, 1, INT64 - 1)
    if body.service_tier not in (None, *SERVICE_TIERS):
        raise unsupported("service_tier", "must be 'auto' or 'standard_only'.")
    if body.stop is not None and body.stop_sequences is not None:
        raise invalid_value("stop", "cannot be combined with 'stop_sequences', which is its name in this API.")
    separates_thinking = settings.reasoning_parser is not None
    budget = thinking_budget(body.thinking, body.max_tokens, separates_thinking=separates_thinking)
    use, conversation = _shown(body, settings)
    sampling = checker.check_shared(
        msgspec.structs.replace(body, service_tier=None),
        max_tokens=body.max_tokens,
        logprobs=None,
        formats=_formats(body.output_config),
        tool_schema=use.schema,
        calls=use.calls,
    )
    if body.stop_sequences is not None:
        stop = checker.checked_stop("stop_sequences", body.stop_sequences)
        sampling = replace(sampling, text=replace(sampling.text, stop=stop))
    eager_tools = frozenset(tool.name for tool in body.tools or [] if tool.eager_input_streaming)
    return CheckedMessage(with_call_format(sampling, use), replace(conversation, budget=budget), use, eager_tools)


def counted_conversation(body: CountTokensRequest, settings: ServingSettings) -> Conversation:
    """The conversation of a message with these fields. Raises `ServingError` naming the invalid field."""
    thinking_budget(body.thinking, 0, separates_thinking=False)
    return _shown(body, settings)[1]


def _shown(body: MessagesRequest | CountTokensRequest, settings: ServingSettings) -> tuple[ToolUse, Conversation]:
    if body.output_config is not None:
        refuse_unsupported(body.output_config, "output_config.")
    choice = body.tool_choice
    parallel = False if choice is not None and choice.disable_parallel_tool_use else None
    use = chosen_use(_checked_tools(body.tools or [], settings.limits), _choice(choice), parallel, settings)
    return use, message_conversation(body, use.tools, settings.limits)


def _checked_tools(tools: Sequence[MessageTool], limits: RequestLimits) -> list[JsonObject]:
    check_at_most("tools", len(tools), limits.max_tools, "tools")
    functions: list[tuple[str, ToolFunction]] = []
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        check_tool_type(param, tool.type)
        refuse_unsupported(tool, f"{param}.")
        functions.append((param, ToolFunction(tool.name, tool.description, tool.input_schema, tool.strict)))
    return checked_functions(functions, limits)


def _choice(choice: MessageToolChoice | None) -> str | NamedTool | None:
    if choice is None:
        return None
    if choice.type not in CHOICES:
        message = f"is {choice.type[:32]!r}; only {', '.join(map(repr, CHOICES))} are supported."
        raise unsupported("tool_choice.type", message)
    if choice.type != TOOL:
        if choice.name is not None:
            raise invalid_value("tool_choice.name", f"is only for the type {TOOL!r}.")
        return WORDS[choice.type]
    if choice.name is None:
        raise missing("tool_choice.name")
    return NamedTool("tool_choice.name", choice.name)


def _formats(output: OutputConfig | None) -> list[RequestedFormat]:
    if output is None or output.format is None:
        return []
    return [text_format("output_config.format.schema", output.format.schema)]

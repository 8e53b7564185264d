"""Checks the fields of /v1/responses and turns them into a conversation and its constraints."""

from collections.abc import Sequence
from dataclasses import dataclass

from loraserve.api.chat.prompts import with_call_format
from loraserve.api.chat.tools import NamedTool, ToolUse, checked_functions, chosen_use
from loraserve.api.http.ranges import INT64, check_at_most, check_range, unsupported
from loraserve.api.inference.sampling import CheckedSampling, SamplingChecker, check_stream_options
from loraserve.api.inference.structured_outputs import ANY_OBJECT, RequestedFormat, text_format
from loraserve.api.responses.input import response_conversation
from loraserve.api.responses.kinds import check_tool_type
from loraserve.api.schemas.responses import FunctionChoice, FunctionTool, ResponsesRequest, ResponseText, SchemaFormat
from loraserve.api.schemas.structured_outputs import JsonObjectFormat
from loraserve.api.schemas.tools import ToolFunction
from loraserve.api.schemas.unsupported import refuse_unsupported
from loraserve.serving.errors import invalid_value
from loraserve.serving.settings import RequestLimits, ServingSettings
from loraserve.serving.text.conversation import Conversation, JsonObject

LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""The second is accepted without effect: it is for reasoning that only the provider can read, and stateless clients
always request it."""
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""Limits of `metadata`, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class CheckedResponse:
    sampling: CheckedSampling
    conversation: Conversation
    tools: Sequence[JsonObject]
    """All tools of the request, including those that `use` leaves out."""
    use: ToolUse


def checked_response(body: ResponsesRequest, checker: SamplingChecker, settings: ServingSettings) -> CheckedResponse:
    """Raises `ServingError` naming the invalid field."""
    for name, part in (("reasoning", body.reasoning), ("text", body.text)):
        if part is not None:
            refuse_unsupported(part, f"{name}.")
    check_stream_options(body.stream, body.stream_options)
    _check_metadata(body.metadata or {})
    if body.max_output_tokens is not None:
        check_range("max_output_tokens", body.max_output_tokens, 1, INT64 - 1)
    tools = _checked_tools(body.tools or [], settings.limits)
    use = chosen_use(tools, _choice(body.tool_choice), body.parallel_tool_calls, settings)
    sampling = checker.check_shared(
        body,
        max_tokens=body.max_output_tokens,
        logprobs=_logprobs(checker, body, use, settings),
        formats=_formats(body.text),
        tool_schema=use.schema,
        calls=use.calls,
    )
    conversation = response_conversation(body, use.tools, settings.limits)
    return CheckedResponse(with_call_format(sampling, use), conversation, tools, use)


def _checked_tools(tools: list[FunctionTool], limits: RequestLimits) -> list[JsonObject]:
    functions: list[tuple[str, ToolFunction]] = []
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        check_tool_type(param, tool.type)
        refuse_unsupported(tool, f"{param}.")
        functions.append((param, ToolFunction(tool.name, tool.description, tool.parameters, tool.strict)))
    return checked_functions(functions, limits)


def _choice(choice: str | FunctionChoice | None) -> str | NamedTool | None:
    if not isinstance(choice, FunctionChoice):
        return choice
    check_tool_type("tool_choice", choice.type)
    return NamedTool("tool_choice.name", choice.name)


def _formats(text: ResponseText | None) -> list[RequestedFormat]:
    match text and text.format:
        case JsonObjectFormat(schema):
            return [text_format("text.format", schema or ANY_OBJECT)]
        case SchemaFormat(schema=schema):
            return [text_format("text.format.schema", schema)]
        case _:
            return []


def _logprobs(checker: SamplingChecker, body: ResponsesRequest, use: ToolUse, settings: ServingSettings) -> int | None:
    include = body.include or []
    for index, included in enumerate(include):
        if included not in INCLUDES:
            message = f"is {included[:64]!r}; only {' and '.join(map(repr, INCLUDES))} are supported. Leave it out."
            raise unsupported(f"include[{index}]", message)
    if body.top_logprobs is not None:
        checker.check_top_logprobs("top_logprobs", body.top_logprobs)
        if body.top_logprobs and LOGPROBS not in include:
            raise invalid_value("top_logprobs", f"needs 'include': [{LOGPROBS!r}].")
    if LOGPROBS not in include:
        return None
    if settings.reasoning_parser is not None:
        message = f"has {LOGPROBS!r}, which is not available on a server with --reasoning-parser."
        raise unsupported("include", message)
    if use.schema is not None or use.call_format is not None:
        message = f"has {LOGPROBS!r}, which is not available if the answer may call tools. Send 'tool_choice': 'none'."
        raise unsupported("include", message)
    return body.top_logprobs or 0


def _check_metadata(metadata: dict[str, str]) -> None:
    check_at_most("metadata", len(metadata), MAX_PAIRS, "pairs")
    for key, value in metadata.items():
        check_at_most("metadata", len(key), MAX_KEY_CHARS, "characters in one key")
        check_at_most(f"metadata.{key}", len(value), MAX_VALUE_CHARS, "characters")

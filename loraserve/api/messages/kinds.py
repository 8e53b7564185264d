"""Supported types of blocks, tools and similar objects in /v1/messages. Others are refused by type."""

import msgspec
from msgspec import Raw

from loraserve.api.http.ranges import unsupported

TEXT, THINKING, REDACTED, TOOL_USE, TOOL_RESULT = "text", "thinking", "redacted_thinking", "tool_use", "tool_result"
BLOCKS = (TEXT, THINKING, REDACTED, TOOL_USE, TOOL_RESULT)
CUSTOM = "custom"
AUTO, ANY, TOOL, NONE = "auto", "any", "tool", "none"
CHOICES = (AUTO, ANY, TOOL, NONE)
ENABLED, DISABLED, ADAPTIVE = "enabled", "disabled", "adaptive"
THINKINGS = (ENABLED, DISABLED, ADAPTIVE)
JSON_SCHEMA = "json_schema"


class _Part(msgspec.Struct):
    type: str = TEXT


class _Block(msgspec.Struct):
    type: str = TEXT
    content: str | list[_Part] | dict[str, Raw] | None = None


class _Message(msgspec.Struct):
    content: str | list[_Block] = ""


class _Tool(msgspec.Struct):
    type: str | None = None


class _Choice(msgspec.Struct):
    type: str = AUTO


class _Thinking(msgspec.Struct):
    type: str = ADAPTIVE


class _Format(msgspec.Struct):
    type: str = JSON_SCHEMA


class _Output(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    """Decodes only types and ignores all other fields."""

    messages: list[_Message] = []
    system: str | list[_Part] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _Output | None = None


DECODER = msgspec.json.Decoder(_Body)
MAX_EXPLAINED = 1024
"""Maximum numbers of messages, and of blocks per message, examined: a body of 2 MB has room for 200,000, which take
0.1 s."""


def refuse_kinds(body: bytes) -> None:
    """For a body that could not be decoded: raises `ServingError` if it contains an unsupported type.

    That explains the failure better than the unknown fields which such an object has.
    """
    try:
        kinds = DECODER.decode(body)
    except msgspec.DecodeError:
        return
    _check_parts("system", kinds.system)
    for index, message in enumerate(kinds.messages[:MAX_EXPLAINED]):
        _check_blocks(f"messages[{index}].content", message.content)
    for index, tool in enumerate(kinds.tools or []):
        check_tool_type(f"tools[{index}]", tool.type)
    if kinds.tool_choice is not None:
        _check_type("tool_choice", kinds.tool_choice.type, CHOICES)
    if kinds.thinking is not None:
        _check_type("thinking", kinds.thinking.type, THINKINGS)
    if kinds.output_config is not None and kinds.output_config.format is not None:
        _check_type("output_config.format", kinds.output_config.format.type, (JSON_SCHEMA,))


def check_tool_type(param: str, kind: str | None) -> None:
    if kind not in (None, CUSTOM):
        message = f"is {kind[:32]!r}; only {CUSTOM!r} is supported: this server has no tools of its own."
        raise unsupported(f"{param}.type", message)


def _check_blocks(param: str, content: str | list[_Block]) -> None:
    for index, block in enumerate(content[:MAX_EXPLAINED] if isinstance(content, list) else []):
        _check_type(f"{param}[{index}]", block.type, BLOCKS)
        if block.type == TOOL_RESULT and isinstance(block.content, list):
            _check_parts(f"{param}[{index}].content", block.content)


def _check_parts(param: str, content: str | list[_Part] | None) -> None:
    for index, part in enumerate(content[:MAX_EXPLAINED] if isinstance(content, list) else []):
        _check_type(f"{param}[{index}]", part.type, (TEXT,))


def _check_type(param: str, kind: str, known: tuple[str, ...]) -> None:
    if kind not in known:
        are = "is" if len(known) == 1 else "are"
        raise unsupported(f"{param}.type", f"is {kind[:32]!r}; only {', '.join(map(repr, known))} {are} supported.")

"""Supported types of items, parts and tools in /v1/responses. Others are refused by type."""

import msgspec
from msgspec import Raw

from loraserve.api.chat.conversations import text_of
from loraserve.api.chat.tools import FUNCTION
from loraserve.api.http.ranges import unsupported
from loraserve.api.schemas.responses import InputPart

MESSAGE, REASONING, CALL, CALL_OUTPUT = "message", "reasoning", "function_call", "function_call_output"
KINDS = (MESSAGE, REASONING, CALL, CALL_OUTPUT)
TEXT_PARTS = ("input_text", "output_text")
REASONING_PARTS = ("reasoning_text",)
SUMMARY_PARTS = ("summary_text",)


class _Part(msgspec.Struct):
    type: str = TEXT_PARTS[0]


class _Item(msgspec.Struct):
    type: str = MESSAGE
    content: str | list[_Part] | None = None
    output: str | list[_Part] | dict[str, Raw] | None = None


class _Tool(msgspec.Struct):
    type: str = FUNCTION


class _Body(msgspec.Struct):
    """Decodes only types and ignores all other fields."""

    input: str | list[_Item] = ""
    tools: list[_Tool] | None = None
    tool_choice: str | _Tool | None = None


DECODER = msgspec.json.Decoder(_Body)
MAX_EXPLAINED = 1024
"""Maximum number of items examined: a body of 2 MB has room for 200,000, which take 0.1 s."""


def refuse_kinds(body: bytes) -> None:
    """For a body that could not be decoded: raises `ServingError` if it contains an unsupported type.

    That explains the failure better than the unknown fields which such an item has.
    """
    try:
        kinds = DECODER.decode(body)
    except msgspec.DecodeError:
        return
    items = kinds.input if isinstance(kinds.input, list) else []
    for index, item in enumerate(items[:MAX_EXPLAINED]):
        check_item_type(f"input[{index}]", item.type)
        for field, parts in (("content", item.content), ("output", item.output)):
            if isinstance(parts, list):
                kinds_of_parts = REASONING_PARTS if item.type == REASONING else TEXT_PARTS
                text_of(f"input[{index}].{field}", [InputPart(part.type, "") for part in parts], kinds_of_parts)
    for index, tool in enumerate(kinds.tools or []):
        check_tool_type(f"tools[{index}]", tool.type)
    if isinstance(kinds.tool_choice, _Tool):
        check_tool_type("tool_choice", kinds.tool_choice.type)


def check_item_type(param: str, kind: str) -> None:
    if kind not in KINDS:
        message = f"is {kind[:32]!r}; only {', '.join(map(repr, KINDS))} are supported. Leave the item out."
        raise unsupported(f"{param}.type", message)


def check_tool_type(param: str, kind: str) -> None:
    if kind != FUNCTION:
        message = f"is {kind[:32]!r}; only '{FUNCTION}' is supported: this server has no tools of its own."
        raise unsupported(f"{param}.type", message)

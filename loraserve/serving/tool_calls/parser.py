"""The parser of each format."""

from collections.abc import Sequence

from loraserve.serving.text.conversation import JsonObject
from loraserve.serving.tool_calls.around import CallParser
from loraserve.serving.tool_calls.formats import SYNTAXES, ToolCallFormat
from loraserve.serving.tool_calls.glm_calls import GlmCallParser
from loraserve.serving.tool_calls.json_calls import JsonCallParser
from loraserve.serving.tool_calls.python_calls import PythonCallParser
from loraserve.serving.tool_calls.qwen_calls import QwenCallParser


def call_parser(call_format: ToolCallFormat, tools: Sequence[JsonObject]) -> CallParser:
    """A parser for one answer. call_format: one that has a syntax. tools: as in OpenAI's API."""
    syntax = SYNTAXES[call_format]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    match call_format:
        case ToolCallFormat.QWEN3_CODER:
            return QwenCallParser(syntax, schemas)
        case ToolCallFormat.GLM45:
            return GlmCallParser(syntax, schemas)
        case ToolCallFormat.LFM2:
            return PythonCallParser(syntax)
        case _:
            return JsonCallParser(syntax)

"""How models write tool calls; the names are vLLM's."""

import re
from dataclasses import dataclass
from enum import StrEnum


class ToolCallFormat(StrEnum):
    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, each call; also Qwen's."""
    LLAMA3_JSON = "llama3_json"
    """`{"name": …, "parameters": {…}}` as the whole answer; several with `;` between."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name{…}` for each call, as later models do."""
    OPENAI = "openai"
    """gpt-oss's: messages to `functions.name`, which have no syntax: `HarmonyReader` tells them."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    opening: str
    """Begins calls, wherever it stands."""
    head: re.Pattern[str]
    """All that may be between `opening` and the first brace. Group `array`: a list of calls begins there. Group
    `name`: of the function, whose arguments begin with that brace."""
    closing: str = ""
    """Stands behind a call; the end of the answer will do."""
    may_begin_bare: bool = False
    """Where nothing but calls was written yet, the brace will do as an opening."""
    between: str = " \t\r\n"
    """Characters that mean nothing before, between and after calls."""


SYNTAXES = {
    ToolCallFormat.HERMES: CallSyntax("<tool_call>", re.compile(r"\s*"), closing="</tool_call>"),
    ToolCallFormat.LLAMA3_JSON: CallSyntax(
        "<|python_tag|>", re.compile(r"\s*"), may_begin_bare=True, between=" \t\r\n;"
    ),
    ToolCallFormat.MISTRAL: CallSyntax(
        "[TOOL_CALLS]",
        re.compile(r"\s*(?:(?P<array>\[\s*)|(?P<name>[a-zA-Z0-9_-]+)(?:\[CALL_ID\][a-zA-Z0-9]+)?(?:\[ARGS\])?\s*)"),
    ),
}
LIST_OF_CALLS = CallSyntax("", re.compile(r"\s*(?P<array>\[\s*)"))
"""`[{"name": …, "parameters": {…}}, …]` as the whole answer: what a model is held to that has to call tools."""
